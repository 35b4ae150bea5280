"""What a check says."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One answer of one check; the same on every rank.

    Args:
        check: Name of the check.
        found: Whether something is wrong.
        message: What was seen, in one sentence.
        rank: Where; None where it concerns all ranks, or none.
        number: The figure that it is about; its meaning is in the message.
        remedy: What to do next; empty where there is nothing to do.
        checked: False where the check could not be made; the message says why.

    """

    check: str
    found: bool
    message: str
    rank: int | None = None
    number: float | None = None
    remedy: str = ""
    checked: bool = True

    @property
    def status(self) -> str:
        """``"FOUND"``, ``"fine"`` or ``"not checked"``."""
        return "FOUND" if self.found else "fine" if self.checked else "not checked"
