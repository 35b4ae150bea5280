"""Where the laws are tested."""

from dataclasses import dataclass
from datetime import timedelta

from lightning_commopt.routes import ControlGroup

__all__ = ["Ground"]


@dataclass(frozen=True)
class Ground:
    """Ranks and their device.

    Args:
        control: Agreement between the ranks.
        device: ``cpu`` or ``cuda``.
        timeout: Of the groups that are made; None for the default.

    """

    control: ControlGroup
    device: str
    timeout: timedelta | None = None
