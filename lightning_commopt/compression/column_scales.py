"""Factors that make the columns of a matrix alike, so that what shares a scale along a row has one size."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from lightning_commopt.compression import kernels
from lightning_commopt.compression.base import Context
from lightning_commopt.compression.layout import BucketLayout, Matrix

__all__ = ["TILE", "ColumnScales"]

_MIN_SIDE = 16  # a matrix, or a chunk's part of it, with fewer rows or columns is left as it is
_OCTAVE = 8  # exponents that double a factor
_LARGEST = 255  # exponent of a column that is zero
TILE = 1 << 16  # elements measured at a time: their magnitudes stay in the processor's cache


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
        self.matrices = _matrices(context.layout, context.start, numel) if on else ()
        """Those that are levelled."""
        self.nbytes = sum(matrix.columns for matrix in self.matrices)
        """Bytes of the exponents, one a column."""

    def measure(self, values: Tensor, exponents: Tensor) -> None:
        """Write the exponents of a chunk.

        Args:
            values: fp32, shape ``(n,)``.
            exponents: uint8, shape ``(nbytes,)``.

        """
        sizes, largest = self._scratch.get("column sizes", (2, self.nbytes), torch.float32)
        if kernel := kernels.columns_for(values):
            kernel(values, self.matrices, sizes, largest)
        else:
            self._measure(values, sizes, largest)
        ratios = torch.div(largest, sizes, out=sizes).log2_().mul_(_OCTAVE).round_().clamp_(0, _LARGEST)
        exponents.copy_(ratios.nan_to_num_(0.0))

    def _measure(self, values: Tensor, sizes: Tensor, largest: Tensor) -> None:
        """Write the sum of magnitudes of each column, and beside it the largest of its matrix."""
        at = 0
        for matrix in self.matrices:
            size = sizes[at : at + matrix.columns].zero_()
            for rows, part in _rows(values[matrix.start : matrix.stop], matrix.column, matrix.columns):
                for some in rows.split(max(1, TILE // matrix.columns)):
                    magnitude = self._scratch.get("column magnitude", some.shape, torch.float32)
                    size[part].add_(_sum(torch.abs(some, out=magnitude)))
            largest[at : at + matrix.columns].copy_(size.max())
            at += matrix.columns

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
        for matrix in self.matrices:
            columns = matrix.columns
            begin, end = max(matrix.start, start), min(matrix.stop, start + len(values))
            if begin < end:
                column = (matrix.column + begin - matrix.start) % columns
                for rows, part in _rows(values[begin - start : end - start], column, columns):
                    rows.mul_(factors[at : at + columns][part])
            at += columns


def _sum(rows: Tensor) -> Tensor:
    """Return the sum of rows, the later half of them added to the earlier one until one is left; ``rows`` is changed.

    The order of adding is part of the definition: kernels give the same bits.
    """
    count = len(rows)
    while count > 1:
        half = (count + 1) // 2
        rows[: count - half].add_(rows[half:count])
        count = half
    return rows[0]


def _table(sign: int) -> Tensor:
    """Return fp32, shape ``(256,)``: the factor of each exponent."""
    return torch.tensor([2.0 ** (sign * k / _OCTAVE) for k in range(_LARGEST + 1)])


@lru_cache(maxsize=4096)
def _matrices(layout: BucketLayout, start: int, numel: int) -> tuple[Matrix, ...]:
    """Return each matrix that has enough rows and columns in the chunk."""
    found = []
    for segment, first, last in layout.overlapping(start, numel):
        columns = segment.parameter.numel // segment.parameter.shape[0]
        if columns >= _MIN_SIDE and last - first >= _MIN_SIDE * columns:
            column = (start + first - segment.packed_offset) % columns
            found.append(Matrix(first, last, column, columns))
    return tuple(found)


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
