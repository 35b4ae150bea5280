"""SIGTERM to one rank ends all of them at the same step."""

import logging
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["Sigterm"]

log = logging.getLogger(__name__)


class Sigterm:
    """What one Trainer does about SIGTERM, from `setup` to `teardown` of the strategy.

    Lightning 2.6 broadcasts a flag of rank 0 before every batch, and another one inside the signal handler, where the
    other ranks do not meet it: on gloo all of them hang. Here the handler only takes a note. In a fit it reaches all
    ranks

    - with the gradients' own messages, where a method is in force: no rank waits for another between two exchanges;
    - else before every batch as in Lightning, but from any rank, and through the control group, which spares a GPU
      the wait that Lightning's costs.

    Then Lightning ends all ranks alike with ``SIGTERMException``. A request that arrives during validation is acted
    upon when training goes on; one after the last step is void, since the fit ends anyway. Outside a fit the rank ends
    on its own, as in Lightning before 2.6.

    """

    def __init__(self, trainer: "pl.Trainer", strategy: "CommOptStrategy") -> None:
        self._trainer = trainer
        self._strategy = strategy
        loop = trainer.fit_loop.epoch_loop
        asks = strategy._carries_sigterm is not None or hasattr(
            loop, "_broadcast_sigterm_tensor"
        )  # not in Lightning 2.5
        self._together = trainer.state.fn == TrainerFn.FITTING and asks
        self.asked = False
        """Whether this rank was."""
        self.agreed = False
        """Whether all ranks know that they end, and so may still talk to each other."""
        trainer._signal_connector._sigterm_notifier_fn = self._received  # type: ignore[method-assign]
        if self._together:
            loop._broadcast_sigterm_tensor = self._before_batch  # type: ignore[method-assign]

    def round_done(self) -> None:
        """Let all ranks end after this batch when one was asked to. Call it after each exchange of gradients."""
        path = self._strategy._carries_sigterm
        if path is not None and path.termination.agreed and not self.agreed:
            self._agree()

    def close(self) -> None:
        """Give Lightning its own methods back."""
        vars(self._trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        vars(self._trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)

    def _received(self, signum: Any, _: FrameType | None) -> None:
        """Handle the signal: nothing that waits for another rank may be done in here."""
        log.info(f"[rank: {self._trainer.global_rank}] Received SIGTERM: {signum}")
        launcher = self._strategy.launcher
        if not self.asked and launcher is not None:
            launcher.kill(signum)  # processes that it started are asked, too
        self.asked = True
        if self._strategy.watch is not None:
            self._strategy.watch.terminate()
        if not self._together:
            self._trainer._signal_connector.received_sigterm = True
        elif self._strategy._carries_sigterm is not None:
            self._strategy._carries_sigterm.termination.asked = True

    def _before_batch(self) -> None:
        """Stand in for Lightning's broadcast."""
        if self._strategy._carries_sigterm is not None:
            return
        asked = torch.tensor([int(self.asked)])
        self._strategy._control.all_reduce(asked)
        if asked.item():
            self._agree()
            raise SIGTERMException

    def _agree(self) -> None:
        """Tell Lightning, once nobody waits for this rank any more: it may be gone soon."""
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)
        self._strategy._control.barrier()
        self._trainer._signal_connector.received_sigterm = self.agreed = True
