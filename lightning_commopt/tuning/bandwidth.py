"""Whether the bandwidth moved, from what the exchange in force tells of itself."""

from lightning_commopt.measure import CommStats
from lightning_commopt.routes import ControlGroup

__all__ = ["MOVED", "BandwidthWatch"]

MOVED = 0.2
"""A change of a byte's transfer time that counts."""


class BandwidthWatch:
    """Compares the transfer time of a byte between one look and the next.

    Args:
        control: Agreement between ranks.

    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._before: CommStats | None = None
        self._ns_per_byte: float | None = None

    def begin(self) -> None:
        """Count from here on; what a byte took stays known."""
        self._before = None

    def forget(self) -> None:
        """Forget what a byte took: something else is in force."""
        self._ns_per_byte = None

    def moved(self, stats: CommStats) -> bool:
        """Return whether a byte takes a fifth more or less than before. A collective.

        Args:
            stats: Counters so far.

        """
        window = stats if self._before is None else stats - self._before
        first, self._before = self._before is None, stats
        transfer_ms = window.transfer_ms
        mine = transfer_ms / window.sent_bytes * 1e6 if transfer_ms and window.sent_bytes else 0.0
        now = max(self._control.all_gather(mine))
        if first or not now:
            return False
        known, self._ns_per_byte = self._ns_per_byte, self._ns_per_byte or now
        if known is None or abs(now / known - 1) < MOVED:
            return False
        self._ns_per_byte = None
        return True
