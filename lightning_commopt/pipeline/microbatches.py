"""Cutting a batch into microbatches, and putting their outputs together."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_commopt.pipeline.errors import PipelineError

__all__ = ["Microbatch", "merge_outputs", "signature", "split_batch", "tensors_in"]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Args:
        batch: Of the same structure as the whole.
        rows: Samples in it.
        share: Its part of the whole, 0 to 1.

    """

    batch: Any
    rows: int
    share: float


def split_batch(batch: Any, count: int) -> list[Microbatch]:
    """Cut a batch along the first dimension into ``count`` parts that differ by one row at most; fewer for few rows.

    Tensors whose first dimension is that of the first tensor are cut, as are lists of as many objects; everything else
    goes to all parts.

    Raises:
        PipelineError: The batch has no tensor with a first dimension.

    """
    tensors = [t for t in tensors_in(batch) if t.ndim]
    if not tensors or not tensors[0].shape[0]:
        raise PipelineError("A batch without a tensor that has samples along its first dimension cannot be split.")
    rows = tensors[0].shape[0]
    count = min(count, rows)
    ends = [rows * (i + 1) // count for i in range(count)]
    starts = [0, *ends[:-1]]
    return [
        Microbatch(_cut(batch, slice(start, end), rows), end - start, (end - start) / rows)
        for start, end in zip(starts, ends, strict=True)
    ]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors of a nested batch, in its order."""
    found: list[Tensor] = []
    _visit(batch, found.append)
    return found


def signature(batch: Any) -> tuple[Any, ...]:
    """Return what tells batches of different shapes apart."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors_in(batch))


def merge_outputs(outputs: Sequence[Any], parts: Sequence[Microbatch], *, summed: bool = False) -> Any:
    """Put together what a step returned for each part of a batch.

    Numbers become their mean (weighted by rows) or sum; tensors with one row a sample are joined; of everything else,
    the first stays.

    """
    if not outputs or outputs[0] is None:
        return None
    structure = tree_flatten(outputs[0])[1]
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    return tree_unflatten([_merge(column, parts, summed) for column in columns], structure)


def _merge(values: tuple[Any, ...], parts: Sequence[Microbatch], summed: bool) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if all(v.ndim and v.shape[0] == part.rows for v, part in zip(values, parts, strict=True)):
        return torch.cat(values)
    if values[0].ndim or not values[0].is_floating_point():
        return values[0]
    return sum(v if summed else v * part.share for v, part in zip(values, parts, strict=True))


def _cut(value: Any, where: slice, rows: int) -> Any:
    if isinstance(value, Tensor):
        return value[where] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, MutableMapping):
        part = copy.copy(value)
        for key in value:
            part[key] = _cut(value[key], where, rows)
        return part
    if isinstance(value, list | tuple):
        if len(value) == rows and not tensors_in(value):
            return value[where]
        items = [_cut(item, where, rows) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replaced = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(replaced, field.name, _cut(getattr(value, field.name), where, rows))
        return replaced
    return value


def _visit(value: Any, see: Callable[[Tensor], None]) -> None:
    if isinstance(value, Tensor):
        see(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _visit(item, see)
    elif isinstance(value, list | tuple):
        for item in value:
            _visit(item, see)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _visit(getattr(value, field.name), see)
