"""SIGTERM on one rank ends all ranks before the same batch."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_commopt.failure.watch import Watch

__all__ = ["SharedSigterm"]

_HANDLER, _BROADCAST = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor"


class SharedSigterm:
    """Replaces two parts of Lightning 2.6: its handler, which waits for all ranks inside the signal, and its question.

    Lightning asks rank 0 before every batch whether to end. Here rank 0 says yes when any rank got the signal. In
    validation, test and prediction the rank that got it ends at once, and the others because it did.

    Args:
        trainer: Of the run.
        watch: Carries the signal to rank 0.

    """

    def __init__(self, trainer: "pl.Trainer", watch: Watch) -> None:
        self._trainer, self._watch = trainer, watch
        self._patched: list[tuple[Any, str]] = []
        connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        if hasattr(connector, _HANDLER) and hasattr(loop, _BROADCAST):  # else this version of Lightning has other ways
            ask = getattr(loop, _BROADCAST)
            self._patch(connector, _HANDLER, self._note)
            self._patch(loop, _BROADCAST, lambda: self._ask(ask))

    def close(self) -> None:
        """Give Lightning its own parts back."""
        for owner, name in self._patched:
            vars(owner).pop(name, None)
        self._patched = []

    def _patch(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        setattr(owner, name, function)
        self._patched.append((owner, name))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._watch.got_sigterm:
            launcher.kill(signum)
        self._watch.terminate()
        if not self._trainer.training:  # other loops ask this rank alone
            self._trainer._signal_connector.received_sigterm = True

    def _ask(self, ask: Callable[[], None]) -> None:
        if self._watch.terminating and self._watch.rank == 0:
            self._trainer._signal_connector.received_sigterm = True
        ask()
