"""Factors that make the columns of a matrix alike, so that what shares a scale along a row has one size."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.layout import BucketLayout

__all__ = ["ColumnScales"]

_MIN_SIDE = 16  # a matrix, or a chunk's part of it, with fewer rows or columns is left as it is
_OCTAVE = 8  # exponents that double a factor
_LARGEST = 255  # exponent of a column that is zero
_TILE = 1 << 16  # elements measured at a time: their magnitudes stay in the processor's cache


class ColumnScales:
    """One exponent ``k`` a column, a byte: a chunk's elements times ``2^(k/8)`` are of one size across its matrices.

    ``k_j = min(255, round(8 log2(max_i c_i / c_j)))`` where ``c_j`` is the mean magnitude of column ``j``. A parameter
    is a matrix of its first dimension against all others; columns are measured over those of its rows that lie in the
    chunk.

    Args:
        context: Where the chunk lies.
        numel: Elements in the chunk.
        on: False for no columns at all.

    """

    def __init__(self, context: Context, numel: int, on: bool = True) -> None:
        self._scratch = context.scratch
        self.matrices = _matrices(context.layout, context.start, numel) if on else []
        """Elements of the chunk, column of the first, and columns, of each matrix."""
        self.nbytes = sum(columns for _, _, columns in self.matrices)
        """Bytes of the exponents, one a column."""

    def measure(self, values: Tensor, exponents: Tensor) -> None:
        """Write the exponents of a chunk.

        Args:
            values: fp32, shape ``(n,)``.
            exponents: uint8, shape ``(nbytes,)``.

        """
        at = 0
        for matrix, first, columns in self.matrices:
            size = self._scratch.get("column size", (columns,), torch.float32).zero_()
            for rows, part in _rows(values[matrix], first, columns):
                for some in rows.split(max(1, _TILE // columns)):
                    magnitude = self._scratch.get("column magnitude", some.shape, torch.float32)
                    size[part].add_(torch.abs(some, out=magnitude).sum(0))
            ratio = (size.max() / size).log2_().mul_(_OCTAVE).round_().clamp_(0, _LARGEST)
            exponents[at : at + columns].copy_(ratio.nan_to_num_(0.0))
            at += columns

    def factors(self, exponents: Tensor, *, inverse: bool = False) -> Tensor:
        """Return ``2^(k/8)``, or ``2^(-k/8)``, of each column: fp32, the same bits on every device."""
        table = self._scratch.constant(f"column factors {inverse}", lambda: _table(-1 if inverse else 1))
        return torch.index_select(table, 0, exponents.int())

    def multiply(self, values: Tensor, factors: Tensor, start: int = 0) -> None:
        """Multiply each element by its column's factor, in place.

        Args:
            values: fp32, shape ``(m,)``: a stretch of the chunk.
            factors: Those of the chunk's columns.
            start: Where in the chunk the stretch begins.

        """
        at = 0
        for matrix, first, columns in self.matrices:
            begin, end = max(matrix.start, start), min(matrix.stop, start + len(values))
            if begin < end:
                column = (first + begin - matrix.start) % columns
                for rows, part in _rows(values[begin - start : end - start], column, columns):
                    rows.mul_(factors[at : at + columns][part])
            at += columns


def _table(sign: int) -> Tensor:
    """Return fp32, shape ``(256,)``: the factor of each exponent."""
    return torch.tensor([2.0 ** (sign * k / _OCTAVE) for k in range(_LARGEST + 1)])


@lru_cache(maxsize=4096)
def _matrices(layout: BucketLayout, start: int, numel: int) -> list[tuple[slice, int, int]]:
    """Return elements of the chunk, column of the first, and columns, of each matrix that has enough of both sides."""
    found = []
    for segment, first, last in layout.overlapping(start, numel):
        columns = segment.parameter.numel // segment.parameter.shape[0]
        if columns >= _MIN_SIDE and last - first >= _MIN_SIDE * columns:
            column = (start + first - segment.packed_offset) % columns
            found.append((slice(first, last), column, columns))
    return found


def _rows(values: Tensor, column: int, columns: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield the rows of a stretch of a matrix as 2-D views, with their columns: a broken row, whole ones, a broken one.

    Args:
        values: The stretch, shape ``(n,)``.
        column: Column of its first element.
        columns: Columns of the matrix.

    """
    head = min((columns - column) % columns, len(values))
    if head:
        yield values[:head][None], slice(column, column + head)
    whole = (len(values) - head) // columns
    end = head + whole * columns
    yield values[head:end].view(whole, columns), slice(0, columns)
    if end < len(values):
        yield values[end:][None], slice(0, len(values) - end)
