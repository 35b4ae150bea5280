"""What a choice rests on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_commopt.compression import method_named
from lightning_commopt.tuning.cost_model import ComputeProfile, Prediction, predict
from lightning_commopt.tuning.decision import Choice
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.plan import CodecCost, Plan, bucket_numels

__all__ = ["Evidence"]


@dataclass(frozen=True)
class Evidence:
    """What is known when a choice is made; the same on all ranks.

    Args:
        profile: A step without exchange.
        link: The network.
        numels: Elements of each parameter, in the module's order.
        bucket_mbs: Sizes of buckets to choose from, MB.
        own_bucket_mb: Size under DDP's own reducer.
        codecs: Cost of each method; of ``"none"`` that of a bucket that travels densely beside compressed ones.
        exact_fraction: Part of the elements that travels exactly.
        too_large: Methods whose state does not fit into memory.
        overlapped: Whether buckets are worked on while messages of others travel.

    """

    profile: ComputeProfile
    link: Link
    numels: Sequence[int]
    bucket_mbs: Sequence[float]
    own_bucket_mb: float
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    exact_fraction: float = 0.0
    too_large: frozenset[str] = frozenset()
    overlapped: bool = False

    @property
    def dense(self) -> Prediction:
        """A step under DDP's own reducer."""
        return self.of(Choice())

    def buckets(self, choice: Choice) -> list[int]:
        """Return the elements in each bucket, in the order in which they become ready."""
        return bucket_numels(self.numels, choice.bucket_mb or self.own_bucket_mb)

    def of(self, choice: Choice) -> Prediction:
        """Predict a step."""
        plan = Plan(
            method_named(choice.method),
            self.buckets(choice),
            CodecCost() if choice.method == "none" else self.codecs.get(choice.method, CodecCost()),
            0.0 if choice.method == "none" else self.exact_fraction,
            dense_buckets=choice.dense_buckets,
            dense_codec=self.codecs.get("none", CodecCost()),
            overlapped=self.overlapped,
        )
        return predict(self.profile, self.link, plan)
