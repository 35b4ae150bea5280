"""Where to cut a chain of blocks into stages."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["balance"]


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut a chain into consecutive parts of which the costliest is as cheap as can be.

    Of all such cuts, the one with the least sum of squares: the other parts are even, too. The same input gives the
    same cuts on every rank. Takes O(parts * len(costs)^2).

    Args:
        costs: Cost of each block, not negative.
        parts: Number of parts, each of at least one block.

    Returns:
        The first block of each part but the first: ``parts - 1`` ascending indices.

    Raises:
        ValueError: There are fewer blocks than parts, or a cost is negative or not finite.

    Example:
        >>> balance([1, 1, 1, 1, 4], 3)
        (2, 4)

    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"`{len(costs)}` blocks cannot be cut into `{parts}` stages of one block or more.")
    if bad := [cost for cost in costs if not 0 <= cost < math.inf]:
        raise ValueError(f"The cost `{bad[0]}` of a block must be finite and not negative.")
    total = [0.0, *accumulate(map(float, costs))]
    heaviest, _ = _best(total, parts, math.inf, max)
    _, ends = _best(total, parts, heaviest, lambda before, part: before + part * part)
    return ends[:-1]


def _best(
    total: Sequence[float], parts: int, bound: float, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least joint cost of parts that each cost at most ``bound``, and where the parts end."""
    blocks = range(len(total))
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf if block else 0.0, ()) for block in blocks]
    for _ in range(parts):
        best = [
            min(
                (
                    (join(best[start][0], total[end] - total[start]), (*best[start][1], end))
                    for start in range(end)
                    if total[end] - total[start] <= bound
                ),
                default=(math.inf, ()),
            )
            for end in blocks
        ]
    return best[-1]
