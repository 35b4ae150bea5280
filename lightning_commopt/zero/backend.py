"""What stands in for DeepSpeed's communication backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_commopt.zero.exchange import ZeroExchange
from lightning_commopt.zero.held import Reader, check_numel

__all__ = ["GradientBackend"]


class _Done:
    """The handle of a collective that is through."""

    def wait(self) -> None:
        """Return at once."""


class GradientBackend:
    """Takes over sums of gradients while a backward runs; everything else goes to DeepSpeed's own backend.

    Args:
        exchange: Sums buffers, and counts.
        engine: The ``DeepSpeedEngine``.
        dense: Whether the running step belongs to the dense beginning, or nothing is to be compressed at all.

    """

    def __init__(self, exchange: ZeroExchange, engine: Any, dense: Callable[[], bool]) -> None:
        import deepspeed.comm.comm as ds

        self._in_backward = False
        self._exchange = exchange
        self._reader = Reader(engine)
        self._dense = dense
        self._module = ds
        self._inner = ds.cdb
        ds.cdb = self

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Mark a backward, in which sums of floating-point numbers are those of gradients."""
        self._reader.begin()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def remove(self) -> None:
        """Put DeepSpeed's own backend back."""
        if self._module.cdb is self:
            self._module.cdb = self._inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """As DeepSpeed's own."""
        if not self._takes(tensor, op):
            arguments = {} if op is None else {"op": op}
            return self._inner.all_reduce(tensor, group=group, async_op=async_op, **arguments)
        world = dist.get_world_size(group)
        if self._dense():
            with self._exchange.passing(tensor, 2, world):
                return self._inner.all_reduce(tensor, group=group, async_op=async_op)
        flat = tensor.view(-1)
        parameters = self._reader.stretch(flat.dtype, flat.numel(), self._exchange.method)
        self._exchange.all_reduce(flat, parameters, _group(group))
        return _Done() if async_op else None

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """As DeepSpeed's own."""
        if not self._takes(input_tensor, op):
            arguments = {} if op is None else {"op": op}
            return self._inner.reduce_scatter_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op, **arguments
            )
        world = dist.get_world_size(group)
        if self._dense():
            with self._exchange.passing(input_tensor, 1, world):
                return self._inner.reduce_scatter_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        held = self._reader.whole(input_tensor.dtype)
        expected = world * sum(-(-one.numel // world) for one in held)
        check_numel(input_tensor.numel(), expected, input_tensor.numel() == expected)
        self._exchange.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), held, _group(group))
        return _Done() if async_op else None

    def _takes(self, tensor: Tensor, op: Any) -> bool:
        """Whether this is a sum of gradients."""
        if not self._in_backward or not tensor.is_floating_point():
            return False
        from deepspeed.comm import ReduceOp

        return op is None or bool(op == ReduceOp.SUM)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that is meant: None is all ranks."""
    group = group or dist.group.WORLD
    assert group is not None
    return group
