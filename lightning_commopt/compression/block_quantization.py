"""The frame of methods that store one scale and a few bits an element for each block."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context
from lightning_commopt.compression.kernels import kernel_for

__all__ = ["BlockQuantization"]

_TILE = 1 << 18  # elements worked on at a time: their temporaries stay in cache, and few operations are started


@dataclass(frozen=True)
class BlockQuantization(Compression):
    """Splits a chunk into blocks of ``block`` elements, each with a bfloat16 scale.

    The payload is all scales, then all codes. The residual is computed from the *stored* (rounded) scale, so that
    ``input = decoded + residual``. A subclass writes the arithmetic of some blocks; a compiled kernel may do the
    same for all of them (:mod:`~lightning_commopt.compression.kernels`).

    Args:
        block: Elements that share a scale.

    """

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = 8 <= self.block <= 1 << 20 and self.block & (self.block - 1) == 0
        self._require("block", self.block, holds, "a power of two from 8 to 1048576")

    @property
    @override
    def alignment(self) -> int:
        return self.block

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits an element."""

    @abstractmethod
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        """Encode ``b`` blocks and leave the error in ``values``.

        Args:
            values: fp32, shape ``(b, block)``.
            scales: bfloat16, shape ``(b,)``; to be written.
            codes: uint8, shape ``(b, block * bits / 8)``; to be written.
            context: ``context.start`` is the packed offset of the first element of these blocks.

        """

    @abstractmethod
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        """Write the numbers that ``b`` blocks stand for into ``out`` of shape ``(b, block)``."""

    @override
    def wire_bytes(self, numel: int) -> int:
        """``2 n / block + n bits / 8``."""
        return 2 * (numel // self.block) + numel * self.bits // 8

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        blocks = values.view(-1, self.block)
        scales, codes = self._split(payload, len(blocks))
        if kernel := kernel_for(self, blocks, codes):
            kernel.encode(blocks, scales, codes)
            return
        for tile, start in self._tiles(len(blocks), context.start):
            here = Context(context.layout, start, context.round, context.rank, context.hop, context.scratch)
            self.encode_blocks(blocks[tile], scales[tile], codes[tile], here)

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        blocks = out.view(-1, self.block)
        scales, codes = self._split(payload, len(blocks))
        if kernel := kernel_for(self, blocks, codes):
            kernel.decode(scales, codes, blocks, add)
            return
        for tile, _ in self._tiles(len(blocks), context.start):
            if add:
                decoded = context.scratch.get("decoded", blocks[tile].shape, torch.float32)
                self.decode_blocks(scales[tile], codes[tile], decoded, context)
                blocks[tile].add_(decoded)
            else:
                self.decode_blocks(scales[tile], codes[tile], blocks[tile], context)

    def _split(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the scales (bfloat16) and the codes (uint8, a row a block) of a payload as views."""
        return payload[: 2 * blocks].view(torch.bfloat16), payload[2 * blocks :].view(
            blocks, self.block * self.bits // 8
        )

    def _tiles(self, blocks: int, start: int) -> Iterator[tuple[slice, int]]:
        """Yield the blocks of each tile and the packed offset of its first element."""
        step = max(1, _TILE // self.block)
        for first in range(0, blocks, step):
            yield slice(first, min(first + step, blocks)), start + first * self.block


def quantization_step(values: Tensor, largest: float, scales: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Store ``amax|v| / largest`` of each block as its scale.

    Rounding to bfloat16 takes at most the 257th part of it, so ``|v / scale| <= (1 + 2^-8) largest``, up to fp32
    rounding: rounded to an integer, that is at most ``largest`` as long as it is below 128. No code needs clamping.

    Args:
        values: fp32, shape ``(b, block)``.
        largest: The largest code.
        scales: bfloat16, shape ``(b,)``; written.
        context: Working memory.

    Returns:
        The stored scale and its reciprocal (0 where the scale is too small to be divided by), fp32, shape ``(b, 1)``.

    """
    magnitude = torch.abs(values, out=context.scratch.get("magnitude", values.shape, torch.float32))
    step = torch.amax(magnitude, 1, keepdim=True, out=context.scratch.get("step", (len(values), 1), torch.float32))
    step.mul_(1 / largest)
    scales.copy_(step[:, 0])
    step.copy_(scales[:, None])
    inverse = torch.where(step > 1e-30, step.reciprocal(), 0.0)
    return step, inverse
