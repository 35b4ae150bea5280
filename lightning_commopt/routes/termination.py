"""The request to end, from the rank that got it to all ranks."""

import torch
from torch import Tensor

from lightning_commopt.routes.message import TERMINATE

__all__ = ["Termination"]


class Termination:
    """Rides on the flags of each round's first bucket, so that every rank learns of it after the same round.

    On CUDA the flags of a round are read one round later, by when they are there: the host never waits for the device.

    Attributes:
        asked: Whether this rank was asked to end; a signal handler may set it at any time.
        agreed: Whether some rank was. The same on all ranks after each round.

    """

    def __init__(self) -> None:
        self.asked = False
        self.agreed = False
        self._unread: tuple[Tensor, torch.cuda.Event] | None = None

    def round_done(self, flags: Tensor) -> None:
        """Take note of the flags of a round's first bucket, set on any rank, uint8, shape ``(P,)``."""
        if flags.device.type != "cuda":
            self._read(flags)
            return
        last, event = self._unread, torch.cuda.Event()
        self._unread = flags[:1].to("cpu", non_blocking=True), event
        event.record()
        if last is not None:
            last[1].synchronize()
            self._read(last[0])

    def _read(self, flags: Tensor) -> None:
        self.agreed = self.agreed or bool(int(flags[0]) & TERMINATE)
