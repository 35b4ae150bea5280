"""Signs and scales."""

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.bits import pack_bits, unpack_bits
from lightning_commopt.compression.block_quantization import BlockQuantization
from lightning_commopt.compression.column_scales import ColumnScales
from lightning_commopt.compression.kernels import kernel_for

__all__ = ["OneBit"]


@dataclass(frozen=True)
class OneBit(BlockQuantization):
    """The sign of each element and one scale a block, eight signs a byte, with error feedback on both hops.

    ``s = bf16(mean|v|)``, decoded ``s sign(v)``: the closest that two values ``{-s, s}`` come to a block. Seide et al.,
    "1-Bit Stochastic Gradient Descent" (Interspeech 2014); scaled signs with error feedback as in Karimireddy et al.
    (ICML 2019), section 4. Blocks lie along rows. ``columns`` gives each column of a matrix a factor besides
    (:class:`ColumnScales`), so that a feature with large gradients does not drown the others of its block: element
    ``(i, j)`` decodes as ``s_i c_j sign(v)``, a magnitude of rank one as in Shazeer and Stern, "Adafactor" (ICML 2018).

    Payload: ``n / 8 + 2 n / block`` bytes, and with ``columns`` one byte a column.

    When not to use it: where int4 is fast enough; with few steps, or with a learning rate at the edge of stability: the
    residual is about as large as the gradient and delays it by some steps.

    Args:
        block: Elements that share a scale.
        columns: Scale columns too.

    """

    name: ClassVar[str] = "onebit"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "C"
    default_start_step: ClassVar[int] = 60

    columns: bool = True

    @property
    @override
    def bits(self) -> int:
        return 1

    @override
    def wire_bytes(self, numel: int) -> int:
        """``n / 8 + 2 n / block``, and a square matrix's columns."""
        return super().wire_bytes(numel) + (isqrt(numel) if self.columns else 0)

    @override
    def payload_bytes(self, numel: int, context: Context) -> int:
        return super().wire_bytes(numel) + ColumnScales(context, numel, self.columns).nbytes

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        columns = ColumnScales(context, len(values), self.columns)
        payload, exponents = self._split_columns(payload, len(values), columns)
        columns.measure(values, exponents)
        up, down = columns.factors(exponents), columns.factors(exponents, inverse=True)
        blocks = values.view(-1, self.block)
        scales, codes = self._split(payload, len(blocks))
        if kernel := kernel_for(self, blocks, codes):
            kernel.encode(blocks, scales, codes, columns.matrices, up, down)
            return
        for tile, start in self._tiles(len(blocks), 0):
            if not self.columns:
                self.encode_blocks(blocks[tile], scales[tile], codes[tile], context)
                continue
            level = context.scratch.get("level", blocks[tile].shape, torch.float32).copy_(blocks[tile])
            columns.multiply(level.flatten(), up, start)
            decoded = self._signed(level, scales[tile], codes[tile], context)
            columns.multiply(decoded.flatten(), down, start)
            blocks[tile].sub_(decoded)

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        columns = ColumnScales(context, len(out), self.columns)
        payload, exponents = self._split_columns(payload, len(out), columns)
        down = columns.factors(exponents, inverse=True)
        blocks = out.view(-1, self.block)
        scales, codes = self._split(payload, len(blocks))
        if kernel := kernel_for(self, blocks, codes):
            kernel.decode(scales, codes, blocks, columns.matrices, down, add)
            return
        for tile, start in self._tiles(len(blocks), 0):
            some = context.scratch.get("decoded", blocks[tile].shape, torch.float32) if add else blocks[tile]
            self.decode_blocks(scales[tile], codes[tile], some, context)
            columns.multiply(some.flatten(), down, start)
            if add:
                blocks[tile].add_(some)

    def _split_columns(self, payload: Tensor, numel: int, columns: ColumnScales) -> tuple[Tensor, Tensor]:
        """Return a payload without its exponents, and these, as views."""
        at = super().wire_bytes(numel)
        return payload[:at], payload[at : at + columns.nbytes]

    @override
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        values.sub_(self._signed(values, scales, codes, context))

    def _signed(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> Tensor:
        """Write scales and codes, and return each element's sign times its scale: fp32, shape ``(b, block)``."""
        scratch = context.scratch
        magnitude = torch.abs(values, out=scratch.get("magnitude", values.shape, torch.float32))
        scales.copy_(_means(magnitude))
        positive = scratch.get("positive", values.shape, torch.bool)
        pack_bits(torch.ge(values.view(torch.int32), 0, out=positive), codes)  # of zeros, too
        return torch.copysign(scales.float()[:, None], values, out=magnitude)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        out.copy_(unpack_bits(codes, context.scratch, zero=-1).view_as(out)).mul_(scales[:, None])


def _means(rows: Tensor) -> Tensor:
    """Return the mean of each row, its halves added to each other until one number is left; ``rows`` is overwritten.

    The order of adding is part of the definition: kernels give the same bits.
    """
    half = rows.shape[1] // 2
    while half:
        rows[:, :half].add_(rows[:, half : 2 * half])
        half //= 2
    return rows[:, 0].mul(1 / rows.shape[1])
