"""What may be asked of the doctor."""

import math
from dataclasses import dataclass

__all__ = ["DoctorOptions"]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The arguments of :class:`~lightning_commopt.callbacks.DistributedDoctor`, within their bounds.

    Raises:
        ValueError: One is not.

    """

    steps: int
    reference_steps: int
    reference_tolerance: float
    hash_every_n_steps: int
    probe_seconds: float

    def __post_init__(self) -> None:
        """Check all bounds."""
        for option, low, high in (
            ("steps", 1, math.inf),
            ("reference_steps", 0, math.inf),
            ("reference_tolerance", 0, math.inf),
            ("hash_every_n_steps", 1, math.inf),
            ("probe_seconds", 0, 5),
        ):
            if not low <= (value := getattr(self, option)) <= high:
                bound = f"at least {low}" if high == math.inf else f"in {low}..{high}"
                raise ValueError(f"`DistributedDoctor`: `{option}` must be {bound}, got {value!r}.")

    @property
    def window(self) -> int:
        """Optimizer steps until the first table."""
        return max(self.steps, self.reference_steps)
