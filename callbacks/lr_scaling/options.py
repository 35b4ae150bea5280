"""What may be asked of the scaling of learning rates."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["LRScalingOptions", "OnOscillation", "Rule", "Schedule"]

Rule = Literal["linear", "sqrt"]
Schedule = Literal["constant", "cosine"]
OnOscillation = Literal["warn", "reduce", "off"]


@dataclass(frozen=True, kw_only=True)
class LRScalingOptions:
    """The arguments of :class:`~lightning_commopt.callbacks.LinearLRScaling`, within their bounds.

    Raises:
        ValueError: One is not.

    """

    base_batch_size: int
    rule: Rule
    warmup_steps: int | None
    warmup_epochs: float | None
    schedule: Schedule | None
    start_factor: float | None
    min_factor: float
    total_steps: int | None
    batch_size_per_device: int | None
    on_oscillation: OnOscillation

    def __post_init__(self) -> None:
        """Check all bounds."""
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError(
                "`LinearLRScaling` takes one of `warmup_steps` and `warmup_epochs`, got both: "
                f"{self.warmup_steps} and {self.warmup_epochs}."
            )
        self._require(self.rule in ("linear", "sqrt"), "rule", "'linear' or 'sqrt'")
        self._require(self.schedule in (None, "constant", "cosine"), "schedule", "None, 'constant' or 'cosine'")
        self._require(self.on_oscillation in get_args(OnOscillation), "on_oscillation", "'warn', 'reduce' or 'off'")
        self._in_range("base_batch_size", 1)
        self._in_range("warmup_steps", 0)
        self._in_range("warmup_epochs", 0)
        self._in_range("start_factor", 0, 1)
        self._in_range("min_factor", 0, 1)
        self._in_range("total_steps", 1)
        self._in_range("batch_size_per_device", 1)
        if self.schedule != "cosine":
            self._require(self.min_factor == 0, "min_factor", "0 unless `schedule='cosine'`")
            self._require(self.total_steps is None, "total_steps", "None unless `schedule='cosine'`")

    def factor(self, batch_size: float) -> float:
        """Return what rates are multiplied by at the peak, for an effective batch size."""
        ratio = batch_size / self.base_batch_size
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    def _in_range(self, option: str, low: int, high: int | None = None) -> None:
        """Refuse a number outside of its range; None is in it."""
        value = getattr(self, option)
        inside = value is None or low <= value < math.inf and (high is None or value <= high)
        self._require(inside, option, f"at least {low}" if high is None else f"in {low}..{high}")

    def _require(self, valid: bool, option: str, bound: str) -> None:
        if not valid:
            raise ValueError(f"`LinearLRScaling`: `{option}` must be {bound}, got {getattr(self, option)!r}.")
