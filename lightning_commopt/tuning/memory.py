"""Whether a model fits the way it is trained."""

from collections.abc import Sequence

from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

__all__ = ["expected_bytes", "memory_advice"]

_TIGHT = 0.8


def expected_bytes(module: nn.Module, optimizers: Sequence[Optimizer], residual_bytes: int = 0) -> int:
    """Return the bytes of parameters, gradients, optimizer state and residuals; activations come on top.

    Optimizer state is counted where it exists already, else as two numbers a parameter (Adam and its kin), one where
    SGD has momentum, or none.

    Args:
        module: The module.
        optimizers: Its optimizers.
        residual_bytes: Of the compression method.

    """
    weights = sum(p.nbytes for p in module.parameters())
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return weights + gradients + sum(map(_state_bytes, optimizers)) + residual_bytes


def _state_bytes(optimizer: Optimizer) -> int:
    copies = 2
    if isinstance(optimizer, SGD):
        copies = int(any(group.get("momentum") for group in optimizer.param_groups))
    elif isinstance(optimizer, LBFGS):
        copies = 2 * max(int(group.get("history_size", 100)) for group in optimizer.param_groups)
    nbytes: int = sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return copies * nbytes


def memory_advice(
    module: nn.Module, optimizers: Sequence[Optimizer], device_bytes: int | None, ranks: int, residual_bytes: int = 0
) -> str:
    """Return a recommendation where memory will be tight, else an empty text.

    Args:
        module: The module.
        optimizers: Its optimizers.
        device_bytes: Memory of the device; None where it is not known.
        ranks: Number of ranks.
        residual_bytes: Of the compression method.

    """
    needed = expected_bytes(module, optimizers, residual_bytes)
    if device_bytes is None or needed <= _TIGHT * device_bytes:
        return ""
    return (
        f"Parameters, gradients, optimizer state and residuals take {needed / 1e9:.1f} GB of the device's "
        f"{device_bytes / 1e9:.1f} GB ({needed / device_bytes:.0%}), before activations, on each of {ranks} rank(s): "
        "data parallelism keeps all of it on every device. Shard it, for example with Lightning's `FSDPStrategy` or "
        "`ModelParallelStrategy` (hybrid sharding), or cut the model into pipeline stages."
    )
