"""A place in Lightning's loops: right after data was loaded, whoever asked for it.

The hooks of callbacks and strategies come too late: `configure_optimizers` may ask for
`trainer.estimated_stepping_batches`, which loads the data and must be the same number on all ranks.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["LoopPatches"]


class LoopPatches:
    """Wraps ``setup_data`` of loops until :meth:`undo`."""

    def __init__(self) -> None:
        self._loops: list[Any] = []

    def wrap(self, loop: Any, around: Callable[[Callable[[], None]], None]) -> None:
        """Call ``around`` with the loop's own ``setup_data`` wherever that was to be called."""
        own = loop.setup_data
        loop.setup_data = lambda: around(own)
        self._loops.append(loop)

    def undo(self) -> None:
        """Give all loops their own methods back."""
        for loop in self._loops:
            del loop.setup_data
        self._loops = []
