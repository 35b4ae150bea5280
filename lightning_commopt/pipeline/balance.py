"""Where to cut a chain of blocks into stages."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["DoesNotFitError", "balance"]


class DoesNotFitError(ValueError):
    """No cuts keep every part within its limit."""


def balance(costs: Sequence[float], parts: int, fits: Callable[[int, int, int], bool] | None = None) -> tuple[int, ...]:
    """Cut a chain into consecutive parts of which the costliest is as cheap as can be.

    Of all such cuts, the one with the least sum of squares: the other parts are even, too. The same input gives the
    same cuts on every rank. Takes O(parts * len(costs)^2).

    Args:
        costs: Cost of each block, not negative.
        parts: Number of parts, each of at least one block.
        fits: Tells whether a part may have the blocks from one to before another; others are not considered.

    Returns:
        The first block of each part but the first: ``parts - 1`` ascending indices.

    Raises:
        DoesNotFitError: No parts fit.
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
    fits = fits or (lambda part, first, end: True)
    heaviest, _ = _best(total, parts, math.inf, max, fits)
    if heaviest == math.inf:
        raise DoesNotFitError(f"No cuts of `{len(costs)}` blocks into `{parts}` parts keep every part in its limit.")
    _, ends = _best(total, parts, heaviest, lambda before, part: before + part * part, fits)
    return ends[:-1]


def _best(
    total: Sequence[float],
    parts: int,
    bound: float,
    join: Callable[[float, float], float],
    fits: Callable[[int, int, int], bool],
) -> tuple[float, tuple[int, ...]]:
    """Return the least joint cost of parts that each cost at most ``bound``, and where the parts end."""
    blocks = range(len(total))
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf if block else 0.0, ()) for block in blocks]
    for part in range(parts):
        best = [
            min(
                (
                    (join(best[start][0], total[end] - total[start]), (*best[start][1], end))
                    for start in range(end)
                    if best[start][0] < math.inf and total[end] - total[start] <= bound and fits(part, start, end)
                ),
                default=(math.inf, ()),
            )
            for end in blocks
        ]
    return best[-1]
