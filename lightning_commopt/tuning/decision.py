"""What was decided, when, and why: plain values that are logged, saved and replayed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Choice", "Decision"]


@dataclass(frozen=True)
class Choice:
    """How gradients are exchanged from a step on.

    Args:
        method: Its word. ``"none"``: DDP's own reducer.
        bucket_mb: DDP's ``bucket_cap_mb``; None: as the user set it.
        dense_buckets: So many buckets travel densely all the same: those that become ready first.

    """

    method: str = "none"
    bucket_mb: float | None = None
    dense_buckets: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice and its reason.

    Args:
        step: Exchanges that were done before it came into force.
        choice: What is in force from then on.
        reason: In words.
        predicted_ms: Of a step under this choice; 0 where nothing was predicted.
        dense_ms: Of a step under DDP's own reducer, predicted.
        predictions: ``(method, bucket_mb, ms)`` of everything that was considered.

    """

    step: int
    choice: Choice
    reason: str
    predicted_ms: float = 0.0
    dense_ms: float = 0.0
    predictions: tuple[tuple[str, float | None, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Decision":
        """Return what :meth:`to_dict` was made of."""
        predictions = tuple((method, bucket_mb, ms) for method, bucket_mb, ms in values["predictions"])
        return cls(**{**values, "choice": Choice(**values["choice"]), "predictions": predictions})
