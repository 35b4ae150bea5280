"""Other options for a Trainer that somebody else's code makes."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

__all__ = ["StopAfter", "quiet", "trainer_options"]

_LEFT_OUT = (BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder, ModelSummary, ProgressBar, Timer)


@contextmanager
def trainer_options(changes: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Change what is passed to every ``Trainer`` that is made in the block.

    Args:
        changes: From the options that were given to those that the Trainer gets.

    Yields:
        The options that were given, of each Trainer.

    """
    given: list[dict[str, Any]] = []
    init = pl.Trainer.__init__

    @functools.wraps(init)
    def changed(self: "pl.Trainer", **options: Any) -> None:
        given.append(dict(options))
        init(self, **changes(dict(options)))

    pl.Trainer.__init__ = changed  # type: ignore[method-assign]
    try:
        yield given
    finally:
        pl.Trainer.__init__ = init  # type: ignore[method-assign]


def quiet(options: dict[str, Any], folder: str, more_callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Return options of a trial: it trains, and leaves nothing behind.

    No logs, checkpoints, progress bar or validation. The user's callbacks stay, but for those that write, stop, or look
    for settings.

    Args:
        options: What the user passes to ``Trainer``.
        folder: A temporary one, for what Lightning writes in the meantime.
        more_callbacks: To be added.

    """
    callbacks = options.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    return {
        **options,
        "callbacks": [*(c for c in callbacks if not isinstance(c, _LEFT_OUT)), *more_callbacks],
        "logger": DummyLogger(),
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
    }


class StopAfter(Callback):
    """Ends a fit early, with schedules that are those of the whole one.

    Args:
        steps: Optimizer steps.

    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", *args: Any) -> None:
        if trainer.global_step >= self.steps:
            trainer.should_stop = True
