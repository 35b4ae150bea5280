"""int8 and int4 in one launch a chunk: scale, codes and residual of a block in one visit."""

import torch
import triton.language as tl
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.int4 import Int4
from lightning_commopt.compression.int8 import Int8
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.triton.compiler import LARGEST_BLOCK, compiled, launch, part_of_kernels
from lightning_commopt.compression.kernels.triton.numbers import bits_of, nearest_integer, rounded, widened

__all__ = ["kernel_of"]


@part_of_kernels
def _rows(ROWS: tl.constexpr) -> tl.tensor:
    """The blocks of this program, as int64."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@part_of_kernels
def _magnitudes(values: tl.tensor) -> tl.tensor:
    """Magnitudes as integers, which order as they do, NaN above all."""
    return bits_of(values) & 0x7FFFFFFF


@part_of_kernels
def _inverse(step: tl.tensor) -> tl.tensor:
    """The reciprocal of a scale, 0 where it is too small to be divided by."""
    usable = step > 1e-30
    one = tl.full(step.shape, 1.0, tl.float32)
    return tl.where(usable, tl.div_rn(one, tl.where(usable, step, one)), 0.0)


@compiled("scales", "blocks")
def _encode_int8(
    values: tl.tensor, scales: tl.tensor, codes: tl.tensor, blocks: tl.tensor, SIZE: tl.constexpr, ROWS: tl.constexpr
) -> None:
    rows = _rows(ROWS)
    inside = rows < blocks
    at = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    block = tl.load(values + at, mask=inside[:, None], other=0.0)
    largest = tl.max(_magnitudes(block), axis=1).to(tl.float32, bitcast=True)
    scale = rounded(largest * (1 / 127.0))
    step = widened(scale)
    level = nearest_integer(block * _inverse(step)[:, None])
    tl.store(scales + rows, scale, mask=inside)
    tl.store(codes + at, level.to(tl.int32).to(tl.int8), mask=inside[:, None])
    tl.store(values + at, block - level * step[:, None], mask=inside[:, None])


@compiled("scales", "blocks")
def _encode_int4(
    values: tl.tensor, scales: tl.tensor, codes: tl.tensor, blocks: tl.tensor, SIZE: tl.constexpr, ROWS: tl.constexpr
) -> None:
    rows = _rows(ROWS)
    inside = rows < blocks
    lane = tl.arange(0, SIZE // 2)[None, :]
    at = rows[:, None] * SIZE + lane
    low = tl.load(values + at, mask=inside[:, None], other=0.0)
    high = tl.load(values + at + SIZE // 2, mask=inside[:, None], other=0.0)
    magnitude = tl.maximum(_magnitudes(low), _magnitudes(high))
    scale = rounded(tl.max(magnitude, axis=1).to(tl.float32, bitcast=True) * (1 / 7.0))
    step = widened(scale)
    inverse = _inverse(step)[:, None]
    lower, upper = nearest_integer(low * inverse), nearest_integer(high * inverse)
    code = lower.to(tl.int32) + 16 * upper.to(tl.int32) + (8 + 16 * 8)
    tl.store(scales + rows, scale, mask=inside)
    tl.store(codes + rows[:, None] * (SIZE // 2) + lane, code.to(tl.uint8), mask=inside[:, None])
    tl.store(values + at, low - lower * step[:, None], mask=inside[:, None])
    tl.store(values + at + SIZE // 2, high - upper * step[:, None], mask=inside[:, None])


@compiled("scales", "blocks")
def _decode_int8(
    out: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    blocks: tl.tensor,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = _rows(ROWS)
    inside = rows < blocks
    at = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    step = widened(tl.load(scales + rows, mask=inside, other=0))
    decoded = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.float32) * step[:, None]
    if ADD:
        decoded += tl.load(out + at, mask=inside[:, None], other=0.0)
    tl.store(out + at, decoded, mask=inside[:, None])


@compiled("scales", "blocks")
def _decode_int4(
    out: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    blocks: tl.tensor,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = _rows(ROWS)
    inside = rows < blocks
    lane = tl.arange(0, SIZE // 2)[None, :]
    at = rows[:, None] * SIZE + lane
    step = widened(tl.load(scales + rows, mask=inside, other=0))[:, None]
    code = tl.load(codes + rows[:, None] * (SIZE // 2) + lane, mask=inside[:, None], other=0).to(tl.int32)
    low = ((code & 15) - 8).to(tl.float32) * step
    high = ((code >> 4) - 8).to(tl.float32) * step
    if ADD:
        low += tl.load(out + at, mask=inside[:, None], other=0.0)
        high += tl.load(out + at + SIZE // 2, mask=inside[:, None], other=0.0)
    tl.store(out + at, low, mask=inside[:, None])
    tl.store(out + at + SIZE // 2, high, mask=inside[:, None])


def _int8_encode(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    blocks, size = values.shape
    launch(_encode_int8, blocks, size, values, scales.view(torch.int16), codes.view(torch.int8), blocks)


def _int8_decode(scales: Tensor, codes: Tensor, out: Tensor, add: bool) -> None:
    blocks, size = out.shape
    launch(_decode_int8, blocks, size, out, scales.view(torch.int16), codes.view(torch.int8), blocks, ADD=add)


def _int4_encode(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    blocks, size = values.shape
    launch(_encode_int4, blocks, size, values, scales.view(torch.int16), codes, blocks)


def _int4_decode(scales: Tensor, codes: Tensor, out: Tensor, add: bool) -> None:
    blocks, size = out.shape
    launch(_decode_int4, blocks, size, out, scales.view(torch.int16), codes, blocks, ADD=add)


def kernel_of(method: Compression) -> Kernel | None:
    """Return the kernel of a method, None where it has none."""
    if type(method) is Int8 and not method.stochastic and method.block <= LARGEST_BLOCK:
        return Kernel(_int8_encode, _int8_decode)
    return Kernel(_int4_encode, _int4_decode) if type(method) is Int4 and method.block <= LARGEST_BLOCK else None
