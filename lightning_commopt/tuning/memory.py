"""Whether a model fits the way it is trained."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from lightning_commopt.compression import method_named

__all__ = ["device_bytes", "expected_bytes", "free_bytes", "largest_state_bytes", "memory_advice"]

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


def largest_state_bytes(
    shapes: Sequence[Sequence[int]],
    methods: Sequence[str],
    ranks: int,
    ranks_per_node: int = 1,
    *,
    shadow: bool = False,
) -> int:
    """Return the state that a rank keeps under the method that keeps most: residuals of both hops, and its own.

    Args:
        shapes: Of the trainable parameters.
        methods: Words of the methods that may be taken.
        ranks: Among which encoded gradients travel.
        ranks_per_node: Ranks of a node that share every bucket; 1 where the exchange is flat.
        shadow: Whether a step may be skipped after its exchange, which doubles the state.

    """

    def nbytes(word: str) -> int:
        method = method_named(word)
        compressed = sum(torch.Size(shape).numel() for shape in shapes if not method.travels_exactly(shape))
        state = method.memory_bytes(compressed // ranks_per_node)
        has_second_hop = method.error_feedback and not method.summable and ranks > 2
        return (state + has_second_hop * 4 * (compressed // ranks_per_node) // ranks) * (2 if shadow else 1)

    return max(map(nbytes, methods), default=0)


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, that of the host for the CPU; None where it is not known."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_bytes("MemTotal")


def free_bytes(device: torch.device) -> int | None:
    """Return what of it is free."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_bytes("MemAvailable")


def _host_bytes(field: str) -> int | None:
    """Read a field of Linux's memory table; None elsewhere."""
    try:
        with open("/proc/meminfo") as table:
            return next((int(line.split()[1]) * 1024 for line in table if line.startswith(field + ":")), None)
    except OSError:
        return None
