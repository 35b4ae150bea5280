"""The function of a user's script that makes a Trainer and what it trains."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch as pl

from lightning_commopt.trials.faults import TargetError, told
from lightning_commopt.trials.options import trainer_options

__all__ = ["Setup", "Target"]

_RUNS = ("fit", "validate", "test", "predict")
_CONTRACT = (
    "must return `(trainer, model)` or `(trainer, model, data)`, where `data` is a DataLoader or LightningDataModule"
)


@dataclass(frozen=True)
class Setup:
    """What the user's function made.

    Args:
        trainer: Not yet used.
        model: What it trains.
        data: Training data, or a data module; None where the model brings its own.
        options: What the function passed to ``Trainer``, before anything was changed.

    """

    trainer: "pl.Trainer"
    model: "pl.LightningModule"
    data: Any
    options: Mapping[str, Any]

    def data_arguments(self) -> dict[str, Any]:
        """Return the data as arguments of ``Trainer.fit``."""
        if self.data is None:
            return {}
        return {"datamodule" if isinstance(self.data, pl.LightningDataModule) else "train_dataloaders": self.data}

    def fit(self) -> None:
        """Train.

        Raises:
            ScriptError: The user's code raised an exception.

        """
        with told("training"):
            self.trainer.fit(self.model, **self.data_arguments())


class Target:
    """A function ``make_trainer()`` in a script, called anew for each trial, so that no trial leaves a trace.

    It takes no arguments, makes a :class:`~lightning.pytorch.Trainer`, and returns it with the model, and with the data
    unless the model has its own: ``(trainer, model)`` or ``(trainer, model, data)``. It must not call ``fit``.

    Args:
        words: ``script.py:make_trainer``, or ``package.module:make_trainer``.

    Raises:
        TargetError: There is no such script or function.

    """

    def __init__(self, words: str) -> None:
        self.words = words
        place, _, name = words.rpartition(":")
        if not place or not name.isidentifier():
            raise TargetError(f"`{words}` names no function: write `script.py:make_trainer`.")
        self.module = module = _script(place) if place.endswith(".py") else _module(place)
        function = getattr(module, name, None)
        if not callable(function):
            raise TargetError(f"`{place}` has no function `{name}`: define it, without arguments; it {_CONTRACT}.")
        self._function: Callable[[], object] = function

    def make(self, changes: Callable[[dict[str, Any]], Mapping[str, Any]] = dict) -> Setup:
        """Call the function.

        Args:
            changes: From the options that it gives to ``Trainer`` to those that the Trainer gets.

        Raises:
            TargetError: It raises, or returns something else than it should.

        """
        with trainer_options(changes) as given, told(f"`{self.words}`"), _without_runs(f"`{self.words}`"):
            made = self._function()
        parts = made if isinstance(made, tuple) else (made,)
        fits = 2 <= len(parts) <= 3 and isinstance(parts[0], pl.Trainer) and isinstance(parts[1], pl.LightningModule)
        if not fits:
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise TargetError(f"`{self.words}` returned ({kinds}): it {_CONTRACT}.")
        if len(given) != 1:
            raise TargetError(
                f"`{self.words}` made {len(given)} Trainers: it must make one, by calling `Trainer(...)`."
            )
        return Setup(parts[0], parts[1], parts[2] if len(parts) == 3 else None, given[0])


@contextlib.contextmanager
def _without_runs(whose: str) -> Iterator[None]:
    """Refuse to train in the user's code: Lightning would start this command once more for every further process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TargetError(f"{whose} starts a run: put `fit` and the like below `if __name__ == '__main__':`.")

    with contextlib.ExitStack() as patches:
        for name in _RUNS:
            patches.enter_context(mock.patch.object(pl.Trainer, name, refuse))
        yield


def _script(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"There is no script `{place}`.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script that it runs
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with told(f"`{place}`"), _without_runs(f"`{place}`"):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    with told(f"`{name}`"), _without_runs(f"`{name}`"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise TargetError(f"There is no module `{name}`: write `script.py:make_trainer` for a script.") from None
