"""How a batch of a wanted size is shared out."""

import math
from dataclasses import dataclass

__all__ = ["Shares", "shares_of"]


@dataclass(frozen=True)
class Shares:
    """A step's samples.

    Args:
        per_device: Samples of one batch on one device.
        ranks: Devices.
        accumulated: Batches of a step.

    """

    per_device: int
    ranks: int
    accumulated: int

    @property
    def effective(self) -> int:
        """Samples of a step on all ranks."""
        return self.per_device * self.ranks * self.accumulated

    def __str__(self) -> str:
        return f"{self.per_device} x {self.ranks} ranks x {self.accumulated} accumulated = {self.effective}"


def shares_of(wanted: int, largest: int, ranks: int) -> Shares:
    """Share a step's samples out in as few batches as fit, exactly where that takes at most twice as many.

    Args:
        wanted: Samples of a step on all ranks.
        largest: Samples that fit on a device.
        ranks: Devices.

    >>> print(shares_of(256, 48, 2))
    32 x 2 ranks x 4 accumulated = 256
    >>> print(shares_of(250, 64, 4))
    62 x 4 ranks x 1 accumulated = 248

    """
    fewest = max(1, math.ceil(wanted / (largest * ranks)))
    for accumulated in range(fewest, 2 * fewest + 1):
        if wanted % (accumulated * ranks) == 0:
            return Shares(wanted // (accumulated * ranks), ranks, accumulated)
    return Shares(min(largest, max(1, round(wanted / (fewest * ranks)))), ranks, fewest)
