"""The two collectives of a tensor-parallel layer (https://arxiv.org/abs/1909.08053, section 3)."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["CopyToRanks", "copy_to_ranks", "sum_over_ranks"]


class CopyToRanks:
    """:func:`copy_to_ranks`, once for all layers in a row with the same input: their gradients are summed together.

    Keeps its last output.

    Args:
        group: The ranks.

    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[weakref.ref[Tensor], tuple[int, bool], Tensor] | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the same values."""
        version = 0 if values.is_inference() else values._version  # those of inference mode have none
        state = version, torch.is_grad_enabled()
        if self._last is None or self._last[0]() is not values or self._last[1] != state:
            self._last = weakref.ref(values), state, copy_to_ranks(values, self._group)
        return self._last[2]


def copy_to_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same values, equal on all ranks; in the backward, sum their gradients over the ranks."""
    output: Tensor = _CopyToRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return output


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the values over the ranks; in the backward, hand on the gradients, equal on all ranks."""
    output: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return output


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    with torch.profiler.record_function("lightning_commopt::tensor_parallel_sum"):
        dist.all_reduce(total, group=group)
    return total


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(values, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
