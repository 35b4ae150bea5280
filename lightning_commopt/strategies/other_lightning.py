"""What users of the package ``pytorch_lightning`` are told.

Installing ``lightning`` installs ``pytorch_lightning`` too: the same sources under another name, with classes and a
registry of its own. Its Trainer cannot take our strategies, and on its own it only says that the name is invalid.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from typing_extensions import override

__all__ = ["import_hint", "refuse_names"]

_MODULE = "pytorch_lightning.strategies"


def refuse_names(names: Iterable[str]) -> None:
    """Make ``pytorch_lightning.Trainer(strategy=name)`` say what to import, now or once that package is imported."""
    names = tuple(names)
    if _MODULE in sys.modules:
        _fill(names, sys.modules[_MODULE])
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport(names))


def import_hint() -> str:
    """Return what to import, where somebody may have imported the other package; else nothing."""
    other = any(name in sys.modules for name in ("pytorch_lightning", _MODULE))
    return ", a strategy for `lightning.pytorch`: write `from lightning.pytorch import Trainer`" if other else ""


def _fill(names: Iterable[str], module: ModuleType) -> None:
    """Register a placeholder for each name."""
    for name in names:
        module.StrategyRegistry.register(name, partial(_refuse, name), "needs `lightning.pytorch`", override=True)


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"`strategy={name!r}` is for `lightning.pytorch`, and this Trainer is from `pytorch_lightning`, whose classes "
        "are separate ones: write `from lightning.pytorch import Trainer, LightningModule, ...` throughout."
    )


class _OnImport(MetaPathFinder):
    """Waits for the other package's strategies to be imported, so that we need not import them (0.3 s)."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_fill(module: ModuleType) -> Any:
                execute(module)
                _fill(self.names, module)

            spec.loader.exec_module = execute_and_fill  # type: ignore[method-assign]
        return spec
