"""A chunk as runs of blocks, each within one matrix or outside all."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_commopt.compression.layout import Matrix

__all__ = ["Run", "runs_of"]


class Run(NamedTuple):
    """Blocks ``first`` to ``last``; ``columns`` is 0 outside matrices.

    Element ``first * size`` lies in column ``column``, elements from ``stop`` on are padding, and ``at`` is the place
    of the factor of column 0.
    """

    first: int
    last: int
    stop: int
    column: int
    columns: int
    at: int


def runs_of(matrices: Sequence[Matrix], blocks: int, size: int) -> list[Run]:
    """Return runs that cover all blocks.

    Args:
        matrices: Those of the chunk whose columns are levelled.
        blocks: Blocks in the chunk.
        size: Elements in a block.

    """
    runs, done, at = [], 0, 0
    for start, stop, column, columns in matrices:
        first, last = start // size, -(-stop // size)
        assert first * size == start >= done * size, "a block belongs to one parameter"
        runs += [Run(done, first, 0, 0, 0, 0), Run(first, last, stop, column, columns, at)]
        done, at = last, at + columns
    return [run for run in (*runs, Run(done, blocks, 0, 0, 0, 0)) if run.first < run.last]
