"""Counts what a rank hands to ``torch.distributed``, below everything that the product counts itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["counted_bytes"]

Count = Callable[[int, dict[str, Any], tuple[Any, ...]], int]
"""From the number of ranks and the arguments of a call to the bytes that this rank sends."""


def _argument(position: int, name: str) -> Callable[[dict[str, Any], tuple[Any, ...]], Any]:
    return lambda options, args: options[name] if name in options else args[position]


def _ring(world: int, options: dict[str, Any], args: tuple[Any, ...]) -> int:
    return int(2 * (world - 1) * _argument(0, "tensor")(options, args).nbytes // world)


def _point(world: int, options: dict[str, Any], args: tuple[Any, ...]) -> int:
    return int(_argument(0, "tensor")(options, args).nbytes)


def _gather(world: int, options: dict[str, Any], args: tuple[Any, ...]) -> int:
    return int(_argument(1, "input_tensor")(options, args).nbytes * (world - 1))


def _shuffle(world: int, options: dict[str, Any], args: tuple[Any, ...]) -> int:
    return int(_argument(1, "input")(options, args).nbytes * (world - 1) // world)


_COUNTED: dict[str, Count] = {
    "all_reduce": _ring,
    "isend": _point,
    "send": _point,
    "all_gather_into_tensor": _gather,
    "all_to_all_single": _shuffle,
}
_REFUSED = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count bytes until the end of the block, in the one element of the list; a call that it cannot count raises."""
    total = [0]
    before = {name: getattr(dist, name) for name in (*_COUNTED, *_REFUSED)}

    def wrap(name: str, count: Count) -> None:
        def call(*args: Any, **options: Any) -> Any:
            total[0] += count(dist.get_world_size(options.get("group")), options, args)
            return before[name](*args, **options)

        setattr(dist, name, call)

    for name, count in _COUNTED.items():
        wrap(name, count)
    for name in _REFUSED:
        setattr(dist, name, _refuse(name))
    try:
        yield total
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _refuse(name: str) -> Callable[..., None]:
    def call(*args: Any, **options: Any) -> None:
        raise AssertionError(f"`{name}` in the exchange of gradients: count it in lightning_commopt/selftest/wire.py.")

    return call
