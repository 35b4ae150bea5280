"""Looking at the Python stack for what hides the inputs of a block."""

import sys
from types import CodeType

from torch.utils import checkpoint

__all__ = ["in_checkpoint", "in_reentrant_checkpoint"]


def in_reentrant_checkpoint() -> bool:
    """Whether the caller runs inside ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)``."""
    return _runs(checkpoint.CheckpointFunction.forward.__code__)


def in_checkpoint() -> bool:
    """Whether the caller runs inside an activation checkpoint of any kind."""
    return _runs(getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint).__code__)


def _runs(*codes: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
