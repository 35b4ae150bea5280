"""Which parameters' gradients a flat buffer of DeepSpeed holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_commopt.compression import Compression, Parameter

__all__ = ["Held", "Reader"]


@dataclass(frozen=True)
class Held:
    """A parameter whose gradient is in a buffer.

    Args:
        name: Its name in the LightningModule.
        shape: Its full shape, whatever part of it a rank keeps.

    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def whole(self, method: Compression) -> Parameter:
        """Describe all of it for a layout."""
        return Parameter(self.name, self.shape, method.travels_exactly(self.shape))

    def part(self, start: int, stop: int, method: Compression) -> Parameter:
        """Describe a stretch of its flattened elements; it travels as the whole parameter does."""
        if (start, stop) == (0, self.numel):
            return self.whole(method)
        return Parameter(f"{self.name}[{start}:{stop}]", (stop - start,), method.travels_exactly(self.shape))


class Reader:
    """Reads from an engine what the buffer holds that it is about to reduce.

    Args:
        engine: The ``DeepSpeedEngine``.

    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._names = {id(p): name for name, p in engine.module.named_parameters()}
        self._last: tuple[Held, ...] = ()
        self._at = 0  # elements of the last buffer that went before, where DeepSpeed sends it in several parts

    def begin(self) -> None:
        """A backward begins, and with it a new buffer."""
        self._last = ()

    def whole(self, dtype: torch.dtype) -> tuple[Held, ...]:
        """Return all parameters of the buffer, in its order.

        Args:
            dtype: Of the buffer.

        """
        return tuple(self._held(p) for p in self._parameters(dtype))

    def stretch(self, dtype: torch.dtype, numel: int, method: Compression) -> list[Parameter]:
        """Return what the next ``numel`` elements of the buffer are.

        Raises:
            RuntimeError: They do not end within the buffer.

        """
        held = self.whole(dtype)
        total = sum(one.numel for one in held)
        if held != self._last or self._at >= total:
            self._last, self._at = held, 0
        start, stop = self._at, self._at + numel
        check_numel(numel, total - start, stop <= total)
        self._at = stop
        ends = list(accumulate(one.numel for one in held))
        return [
            one.part(max(start - end + one.numel, 0), min(stop - end + one.numel, one.numel), method)
            for one, end in zip(held, ends, strict=True)
            if end > start and end - one.numel < stop
        ]

    def _parameters(self, dtype: torch.dtype) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        buckets = getattr(optimizer, "ipg_buckets", None)
        if buckets is None:  # no ZeRO: all gradients, one type after the other
            trainable = [p for p in self._engine.module.parameters() if p.requires_grad and p.numel()]
            return trainable if len({p.dtype for p in trainable}) == 1 else [p for p in trainable if p.dtype == dtype]
        bucket = buckets[dtype] if dtype in buckets else next(iter(buckets.values()))
        return [e if isinstance(e, Tensor) else optimizer.bit16_groups[e[0]][e[1]] for e in bucket.params]

    def _held(self, parameter: Any) -> Held:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return Held(self._names[id(parameter)], tuple(shape))


def check_numel(got: int, expected: int, fits: bool) -> None:
    """Refuse a buffer that holds something else than was read.

    Raises:
        RuntimeError: Saying what to do instead.

    """
    if not fits:
        raise RuntimeError(
            f"DeepSpeed reduces a buffer of {got} elements where its bucket has {expected}: what is in it is not "
            "known, and cannot be compressed. Choose `compression='none'`."
        )
