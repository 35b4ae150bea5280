"""Says which parameters no backward reached: they are exchanged as zeros, and optimizers move them."""

from collections.abc import Iterable
from functools import partial

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_commopt.sharded.parameters import ShardedParameter

__all__ = ["Unused"]


class Unused:
    """Warns once of parameters that this rank trains and whose gradient a whole window of backwards left out.

    Args:
        parameters: All of the module; those that are trained now, and were gathered once, are watched.

    """

    def __init__(self, parameters: Iterable[ShardedParameter]) -> None:
        self._watched: list[ShardedParameter] = []
        self._handles: list[RemovableHandle] = []
        self._used: set[str] = set()
        for parameter in parameters:
            whole = parameter.gathered
            if whole is not None and whole.requires_grad:
                self._watched.append(parameter)
                self._handles.append(whole.register_post_accumulate_grad_hook(partial(self._mark, parameter.name)))

    def end_window(self) -> None:
        """Look at the backwards since the last window ended; after a warning no longer."""
        unused = [p.name for p in self._watched if p.requires_grad and p.name not in self._used]
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
        self._handles, self._watched = [], []

    def _mark(self, name: str, _: Tensor) -> None:
        self._used.add(name)
