"""Says which parameters no backward reached: they are exchanged as zeros, and optimizers move them."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

if TYPE_CHECKING:
    from lightning_commopt.sharded.parameters import ShardedParameter

__all__ = ["Unused"]


class Unused:
    """Warns once of parameters that this rank trains and whose gradient a whole window of backwards left out.

    Args:
        parameters: All of the module; those that are trained now, and were gathered once, are watched.

    """

    def __init__(self, parameters: "Iterable[ShardedParameter]") -> None:
        self._watched = {p.name: p for p in parameters if p.gathered is not None and p.gathered.requires_grad}
        self._used: set[str] = set()
        self._handles = [
            whole.register_post_accumulate_grad_hook(partial(self._mark, name))
            for name, parameter in self._watched.items()
            if (whole := parameter.gathered) is not None
        ]

    def end_window(self) -> None:
        """Look at the backwards since the last window ended; after a warning no longer."""
        unused = [name for name, p in self._watched.items() if p.requires_grad and name not in self._used]
        self._used.clear()
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            rank_zero_warn(
                f"`{unused[0]}`{more} took no part in a step of this rank. Where no rank uses it, its gradient is "
                "zeros: weight decay and momentum still move it. Freeze what is not to train (`requires_grad_(False)`)."
            )
            self.detach()

    def detach(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], {}

    def _mark(self, name: str, _: Tensor) -> None:
        self._used.add(name)
