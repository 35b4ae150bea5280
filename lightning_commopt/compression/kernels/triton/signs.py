"""onebit in one launch a matrix: columns levelled, signs packed, scale and residual in one visit of each block.

What lies between matrices is one launch too, and so is a chunk without columns.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.runs import runs_of
from lightning_commopt.compression.kernels.triton.compiler import LARGEST_BLOCK, compiled, launch, part_of_kernels
from lightning_commopt.compression.kernels.triton.numbers import bits_of, rounded, widened
from lightning_commopt.compression.layout import Matrix
from lightning_commopt.compression.onebit import OneBit

__all__ = ["kernel_of"]

_RUN = ("first", "last", "stop", "column", "columns", "factor")


@part_of_kernels
def _rows(first: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The blocks of this program, as int64."""
    return first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@part_of_kernels
def _factors(
    factors: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    factor: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The column factor of each element of some blocks of a matrix; 1 at padding."""
    lane = tl.arange(0, SIZE)[None, :]
    begin = ((column + (rows - first) * SIZE) % columns).to(tl.int32)  # one slow division a block
    inside = rows[:, None] * SIZE + lane < stop
    return tl.load(factors + factor + (begin[:, None] + lane) % columns, mask=inside, other=1.0)


@part_of_kernels
def _mean(rows: tl.tensor, SIZE: tl.constexpr, ROWS: tl.constexpr, HALVINGS: tl.constexpr) -> tl.tensor:
    """The mean of each row, its halves added to each other until one number is left."""
    for i in tl.static_range(HALVINGS):
        rows = tl.sum(tl.reshape(rows, (ROWS, 2, SIZE >> (i + 1))), axis=1)  # of two: in any order the same
    return tl.reshape(rows, (ROWS,)) * (1.0 / SIZE)


@compiled("scales", "up", "down", *_RUN)
def _encode(
    values: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    up: tl.tensor,
    down: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    stop: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    factor: tl.tensor,
    LEVEL: tl.constexpr,
    HALVINGS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = _rows(first, ROWS)
    inside = rows < last
    at = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    block = tl.load(values + at, mask=inside[:, None], other=0.0)
    level = block
    if LEVEL:
        level = block * _factors(up, rows, first, stop, column, columns, factor, SIZE)
    bits = bits_of(level)
    scale = rounded(_mean((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), SIZE, ROWS, HALVINGS))
    positive = tl.reshape((bits >= 0).to(tl.int32), (ROWS, SIZE // 8, 8))
    code = tl.sum(positive << tl.arange(0, 8)[None, None, :], axis=2)
    signed = bits_of(widened(scale))[:, None] | (bits & -0x80000000)
    decoded = signed.to(tl.float32, bitcast=True)
    if LEVEL:
        decoded *= _factors(down, rows, first, stop, column, columns, factor, SIZE)
    byte = rows[:, None] * (SIZE // 8) + tl.arange(0, SIZE // 8)[None, :]
    tl.store(scales + rows, scale, mask=inside)
    tl.store(codes + byte, code.to(tl.uint8), mask=inside[:, None])
    tl.store(values + at, block - decoded, mask=inside[:, None])


@compiled("scales", "down", *_RUN)
def _decode(
    out: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    down: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    stop: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    factor: tl.tensor,
    ADD: tl.constexpr,
    LEVEL: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = _rows(first, ROWS)
    inside = rows < last
    lane = tl.arange(0, SIZE)[None, :]
    at = rows[:, None] * SIZE + lane
    scale = bits_of(widened(tl.load(scales + rows, mask=inside, other=0)))[:, None]
    code = tl.load(codes + rows[:, None] * (SIZE // 8) + lane // 8, mask=inside[:, None], other=0).to(tl.int32)
    negative = ((code >> (lane % 8)) & 1) ^ 1
    decoded = (scale ^ (negative << 31)).to(tl.float32, bitcast=True)
    if LEVEL:
        decoded *= _factors(down, rows, first, stop, column, columns, factor, SIZE)
    if ADD:
        decoded += tl.load(out + at, mask=inside[:, None], other=0.0)
    tl.store(out + at, decoded, mask=inside[:, None])


def _onebit_encode(
    values: Tensor, scales: Tensor, codes: Tensor, matrices: Sequence[Matrix], up: Tensor, down: Tensor
) -> None:
    blocks, size = values.shape
    arrays = (values, scales.view(torch.int16), codes, up, down)
    for run in runs_of(matrices, blocks, size):
        levelled, halvings = run.columns > 0, size.bit_length() - 1
        launch(_encode, run.last - run.first, size, *arrays, *run, LEVEL=levelled, HALVINGS=halvings)


def _onebit_decode(
    scales: Tensor, codes: Tensor, out: Tensor, matrices: Sequence[Matrix], down: Tensor, add: bool
) -> None:
    blocks, size = out.shape
    arrays = (out, scales.view(torch.int16), codes, down)
    for run in runs_of(matrices, blocks, size):
        launch(_decode, run.last - run.first, size, *arrays, *run, ADD=add, LEVEL=run.columns > 0)


def kernel_of(method: Compression) -> Kernel | None:
    """Return the kernel of a method, None where it has none."""
    if type(method) is not OneBit or method.block > LARGEST_BLOCK:
        return None
    return Kernel(_onebit_encode, _onebit_decode)
