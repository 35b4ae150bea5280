"""Compiled onebit: columns levelled, signs packed, mean magnitude and residual in one visit of each block."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.column_scales import TILE
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.numba.bfloat16 import rounded, widened
from lightning_commopt.compression.kernels.numba.compiler import compiled, part_of_kernels
from lightning_commopt.compression.kernels.runs import Run, runs_of
from lightning_commopt.compression.layout import Matrix
from lightning_commopt.compression.onebit import OneBit

__all__ = ["kernel_of", "measure"]

Array = npt.NDArray[Any]

_ONE, _NONE = np.float32(1.0), np.float32(0.0)
_GATHER_BITS = np.uint64(0x0102040810204080)  # see `pack_bits`


@part_of_kernels
def _spread(factors: Array, run: Array, block: int, size: int, here: Array) -> None:
    """Write the column factor of each element of a block; 1 outside matrices. ``run``: a ``Run``."""
    first, stop, column, columns, at = run[0], run[2], run[3], run[4], run[5]
    done, count = 0, min(size, stop - block * size) if columns else 0
    column = (column + (block - first) * size) % columns if columns else 0
    while done < count:
        some = min(columns - column, count - done)
        source, target = factors[at + column : at + column + some], here[done : done + some]
        for i in range(some):
            target[i] = source[i]
        done, column = done + some, 0
    rest = here[done:]
    for i in range(len(rest)):
        rest[i] = _ONE


@compiled("void(float32[:, ::1], uint16[::1], uint8[:, ::1], int64[:, ::1], float32[::1], float32[::1])")
def _encode(values: Array, scales: Array, codes: Array, runs: Array, up: Array, down: Array) -> None:
    size = values.shape[1]
    levels, restores = np.ones(size, np.float32), np.ones(size, np.float32)
    level, magnitude = np.empty(size, np.float32), np.empty(size, np.float32)
    bits = level.view(np.int32)
    positive = np.empty(size, np.uint8)
    eight = positive.view(np.uint64)
    share = _ONE / np.float32(size)
    for r in range(len(runs)):
        for b in range(runs[r, 0], runs[r, 1]):
            if len(up):
                _spread(up, runs[r], b, size, levels)
                _spread(down, runs[r], b, size, restores)
            block, code = values[b], codes[b]
            for i in range(size):
                level[i] = block[i] * levels[i]
                magnitude[i] = abs(level[i])
                positive[i] = np.uint8(bits[i] >= 0)
            for i in range(size // 8):
                code[i] = np.uint8((eight[i] * _GATHER_BITS) >> np.uint64(56))
            half = size // 2
            while half:
                for i in range(half):
                    magnitude[i] += magnitude[half + i]
                half //= 2
            scales[b] = rounded(magnitude[0] * share)
            scale = widened(scales[b])
            for i in range(size):
                block[i] -= (scale if bits[i] >= 0 else -scale) * restores[i]


@compiled("void(uint16[::1], uint8[:, ::1], float32[:, ::1], int64[:, ::1], float32[::1], boolean)")
def _decode(scales: Array, codes: Array, out: Array, runs: Array, down: Array, add: bool) -> None:
    size = out.shape[1]
    restores, signed = np.ones(size, np.float32), np.empty(size, np.float32)
    bits = signed.view(np.uint32)
    for r in range(len(runs)):
        for b in range(runs[r, 0], runs[r, 1]):
            if len(down):
                _spread(down, runs[r], b, size, restores)
            block, code, scale = out[b], codes[b], np.uint32(np.uint32(scales[b]) << np.uint32(16))
            for i in range(size // 8):
                negative = np.uint32(~np.uint32(code[i]))
                for j in range(8):  # a bit that is not set becomes the sign
                    bits[8 * i + j] = scale ^ np.uint32((negative << np.uint32(31 - j)) & np.uint32(0x80000000))
            if add:
                for i in range(size):
                    block[i] += signed[i] * restores[i]
            else:
                for i in range(size):
                    block[i] = signed[i] * restores[i]


@compiled("void(float32[::1], int64[:, ::1], int64, float32[::1], float32[::1])")
def _measure(values: Array, matrices: Array, tile: int, sizes: Array, largest: Array) -> None:
    """Write the sum of magnitudes of each column, and beside it the largest of its matrix; see `ColumnScales`."""
    at, work = 0, np.empty(tile, np.float32)
    for m in range(len(matrices)):
        start, stop, column, columns = matrices[m]
        if columns > len(work):
            work = np.empty(columns, np.float32)
        size = sizes[at : at + columns]
        size[:] = _NONE
        while start < stop:
            count = min(columns - column, stop - start)
            if count == columns:  # whole rows, as many as a tile holds
                count *= min(max(1, tile // columns), (stop - start) // columns)
            some = values[start : start + count]
            for i in range(count):
                work[i] = abs(some[i])
            rows = count // columns
            while rows > 1:
                half = (rows + 1) // 2
                early, late = work[: (rows - half) * columns], work[half * columns : rows * columns]
                for i in range(len(late)):
                    early[i] += late[i]
                rows = half
            part = size[column : column + min(count, columns)]
            for i in range(len(part)):
                part[i] += work[i]
            start, column = start + count, 0
        most = _NONE
        for i in range(columns):
            if size[i] > most or size[i] != size[i]:
                most = size[i]
            if most != most:  # NaN in one column makes all NaN
                break
        largest[at : at + columns] = most
        at += columns


def measure(values: Tensor, matrices: tuple[Matrix, ...], sizes: Tensor, largest: Tensor) -> None:
    """Do what ``ColumnScales`` does in torch."""
    _measure(values.numpy(), _places(matrices), TILE, sizes.numpy(), largest.numpy())


@lru_cache(maxsize=4096)
def _places(matrices: tuple[Matrix, ...]) -> Array:
    return np.array(matrices, np.int64).reshape(-1, 4)


@lru_cache(maxsize=4096)
def _table(matrices: tuple[Matrix, ...], blocks: int, size: int) -> Array:
    """Return a row of the fields of each ``Run``."""
    return np.array(runs_of(matrices, blocks, size), np.int64).reshape(-1, len(Run._fields))


def _onebit_encode(
    values: Tensor, scales: Tensor, codes: Tensor, matrices: tuple[Matrix, ...], up: Tensor, down: Tensor
) -> None:
    runs = _table(matrices, *values.shape)
    _encode(values.numpy(), scales.view(torch.uint16).numpy(), codes.numpy(), runs, up.numpy(), down.numpy())


def _onebit_decode(
    scales: Tensor, codes: Tensor, out: Tensor, matrices: tuple[Matrix, ...], down: Tensor, add: bool
) -> None:
    runs = _table(matrices, *out.shape)
    _decode(scales.view(torch.uint16).numpy(), codes.numpy(), out.numpy(), runs, down.numpy(), add)


def kernel_of(method: Compression) -> Kernel | None:
    """Return the kernel of a method, None where it has none."""
    return Kernel(_onebit_encode, _onebit_decode) if type(method) is OneBit else None
