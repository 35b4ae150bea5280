"""What is installed is what the folders hold."""

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_commopt
import lightning_commopt.callbacks
from lightning_commopt.__about__ import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = {"lightning_commopt": ROOT / "lightning_commopt", "lightning_commopt.callbacks": ROOT / "callbacks"}


def packages_below(name: str, folder: Path) -> set[str]:
    """Every folder that holds Python files; the link to `callbacks/` is not followed."""
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    own = {name} if any(folder.glob("*.py")) else set()
    return own.union(*(packages_below(f"{name}.{path.name}", path) for path in inner))


def test_every_package_is_listed() -> None:
    found = set().union(*(packages_below(name, folder) for name, folder in SOURCES.items()))
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_package_has_an_init() -> None:
    for name in PYPROJECT["tool"]["setuptools"]["packages"]:
        assert (ROOT / Path(*name.split(".")) / "__init__.py").is_file(), name


def test_every_file_that_is_no_module_is_listed() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["package-data"]
    for name, folder in ((n, ROOT / Path(*n.split("."))) for n in PYPROJECT["tool"]["setuptools"]["packages"]):
        other = {path.name for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert other == set(listed.get(name, ())), name


def test_callbacks_is_a_relative_link() -> None:
    assert (ROOT / "lightning_commopt" / "callbacks").readlink() == Path("../callbacks")
    assert Path(*lightning_commopt.callbacks.__path__).samefile(ROOT / "callbacks")


def test_callbacks_has_one_name() -> None:
    spec = importlib.util.spec_from_file_location("callbacks", ROOT / "callbacks" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=r"lightning_commopt\.callbacks"):
        spec.loader.exec_module(module)


def test_annotations_are_published() -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-data"]["lightning_commopt"] == ["py.typed"]
    assert (ROOT / "lightning_commopt" / "py.typed").is_file()


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert metadata.version("lightning-commopt") == __version__
