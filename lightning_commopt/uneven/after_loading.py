"""Places in Lightning's loops: right after data was loaded, whoever asked for it, or an evaluation prepared.

The hooks of callbacks and strategies come too late: `configure_optimizers` may ask for
`trainer.estimated_stepping_batches`, which loads the data and must be the same number on all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

__all__ = ["LoopPatches", "empty_loaders_allowed"]


class LoopPatches:
    """Wraps methods of loops until :meth:`undo`."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str]] = []

    def wrap(self, loop: Any, around: Callable[[Callable[[], None]], None], method: str = "setup_data") -> None:
        """Call ``around`` with the loop's own method wherever that was to be called."""
        own = getattr(loop, method)
        setattr(loop, method, lambda: around(own))
        self._wrapped.append((loop, method))

    def undo(self) -> None:
        """Give all loops their own methods back."""
        for loop, method in self._wrapped:
            delattr(loop, method)
        self._wrapped = []


@contextmanager
def empty_loaders_allowed(trainer: "pl.Trainer") -> Iterator[bool]:
    """Let a rank without batches come to the agreement; otherwise it alone would raise, and the others wait.

    Yields:
        Whether the user allows it anyway.

    """
    module, data = trainer.lightning_module, trainer.datamodule
    allowed = module.allow_zero_length_dataloader_with_multiple_devices
    module.allow_zero_length_dataloader_with_multiple_devices = True
    try:
        yield allowed or (data is not None and data.allow_zero_length_dataloader_with_multiple_devices)
    finally:
        module.allow_zero_length_dataloader_with_multiple_devices = allowed
