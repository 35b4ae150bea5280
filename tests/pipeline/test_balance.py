"""Cuts are the best ones."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commopt.pipeline import balance
from lightning_commopt.pipeline.balance import DoesNotFitError


def parts_of(costs: list[int], cuts: tuple[int, ...]) -> list[int]:
    return [sum(costs[first:last]) for first, last in itertools.pairwise((0, *cuts, len(costs)))]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cuts_are_better(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    cuts = balance(costs, parts)
    assert len(cuts) == parts - 1

    def quality(cuts: tuple[int, ...]) -> tuple[int, int]:
        sums = parts_of(costs, cuts)
        return max(sums), sum(part * part for part in sums)

    assert quality(cuts) == min(map(quality, itertools.combinations(range(1, len(costs)), parts - 1)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_no_other_cuts_that_fit_are_better(blocks: list[tuple[int, int]], data: st.DataObject) -> None:
    """Later parts have less room."""
    costs, sizes = [cost for cost, _ in blocks], [size for _, size in blocks]
    parts = data.draw(st.integers(1, len(blocks)))
    room = data.draw(st.integers(0, 30))

    def fits(part: int, first: int, end: int) -> bool:
        return sum(sizes[first:end]) <= room - part

    allowed = [
        cuts
        for cuts in itertools.combinations(range(1, len(blocks)), parts - 1)
        if all(size <= room - part for part, size in enumerate(parts_of(sizes, cuts)))
    ]
    if not allowed:
        with pytest.raises(DoesNotFitError, match="keep every part in its limit"):
            balance(costs, parts, fits)
        return
    cuts = balance(costs, parts, fits)
    assert cuts in allowed
    assert max(parts_of(costs, cuts)) == min(max(parts_of(costs, other)) for other in allowed)


@pytest.mark.parametrize("costs", [[1.0], [1.0, math.nan, 1.0], [1.0, -1.0, 1.0], [1.0, math.inf, 1.0]])
def test_refused(costs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"`.*` (blocks cannot be cut|of a block must be finite)"):
        balance(costs, 2)
