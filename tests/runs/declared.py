"""The rows that markers declare, as the sources say it: no test is imported."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from lightning_commopt.compression import METHODS

Row = tuple[str, str]
"""Strategy and feature."""

_WORD = re.compile(r"{(\w+)}")


@dataclass
class Declared:
    """What is known of a row before anything runs.

    Args:
        files: Test files that declare it, relative to the root.
        takes_device: Whether some of their tests run where `--device` says.
    """

    files: set[str] = field(default_factory=set)
    takes_device: bool = False


def rows(strategy: str, feature: str, values: Mapping[str, Any]) -> list[Row]:
    """The rows of a marker.

    Args:
        strategy: First argument.
        feature: Second one, with words in braces.
        values: By word: all that it stands for.

    Raises:
        ValueError: A word stands for nothing.
    """
    words = dict.fromkeys(_WORD.findall(feature))
    known = {"method": tuple(METHODS)} | dict(values)
    if missing := [word for word in words if word not in known]:
        raise ValueError(f"runs({strategy!r}, {feature!r}) does not say what {{{missing[0]}}} stands for")
    chosen = product(*(known[word] for word in words))
    return [(strategy, feature.format(**dict(zip(words, one, strict=True)))) for one in chosen]


def declared(root: Path, folder: str = "tests") -> dict[Row, Declared]:
    """All rows, in the order of files.

    Args:
        root: Of the project.
        folder: Where tests are, relative to it.
    """
    found: dict[Row, Declared] = {}
    for path in sorted((root / folder).rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for scope, (strategy, feature, values) in _markers(tree):
            for row in rows(strategy, feature, values):
                entry = found.setdefault(row, Declared())
                entry.files.add(str(path.relative_to(root)))
                entry.takes_device |= _takes_device(scope) or values.get("on") == "cuda"
    return found


def _markers(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[str, str, dict[str, Any]]]]:
    """Each marker with what it marks: a statement at the top level, or the module."""
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.runs":
                strategy, feature = (ast.literal_eval(argument) for argument in node.args)
                values = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
                yield tree if isinstance(statement, ast.Assign) else statement, (strategy, feature, values)


def _takes_device(scope: ast.AST) -> bool:
    """Whether a test in it uses the fixture `device`, and has no parameter of that name."""
    tests = [n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    using = [test for test in tests if "device" in [argument.arg for argument in test.args.args]]
    return not all(any("device" in ast.unparse(d) for d in test.decorator_list) for test in using)
