"""Whether an optimizer step under a gradient scaler was applied."""

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AppliedSteps"]


class AppliedSteps:
    """Reads a ``GradScaler``'s verdict on each step before ``update`` forgets it.

    An optimizer's step hooks cannot tell: a fused optimizer runs them on a skipped step, too.

    Args:
        scaler: The scaler of the precision plugin; its ``update`` is wrapped until :meth:`close`.

    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._update = scaler.update
        self._found_inf: dict[int, Tensor] = {}
        scaler.update = self._watch  # type: ignore[method-assign]

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor that gradients carry now, a 0- or 1-element fp32 tensor; None before the first scaled loss."""
        return self._scaler._scale

    def applied(self, optimizer: Optimizer) -> bool | Tensor:
        """Return whether the last step of ``optimizer`` was applied, as a 0-d bool tensor on the scaler's device."""
        found = self._found_inf.pop(id(optimizer), None)
        return False if found is None else found == 0

    def close(self) -> None:
        """Give the scaler its own ``update`` back."""
        self._scaler.update = self._update  # type: ignore[method-assign]

    def _watch(self, new_scale: float | Tensor | None = None) -> None:
        """Note what was found, then update."""
        for key, state in self._scaler._per_optimizer_states.items():
            found = [tensor.clone() for tensor in state["found_inf_per_device"].values()]
            if found:
                self._found_inf[key] = torch.stack(found).sum()
        self._update(new_scale)
