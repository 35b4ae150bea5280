"""How long a step will take under a plan: pure functions of what was measured."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_commopt.compression import Uncompressed
from lightning_commopt.tuning.bucket_cost import bucket_costs
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.plan import Plan
from lightning_commopt.tuning.timeline import last_end_ms, last_end_overlapped_ms

__all__ = ["ComputeProfile", "Prediction", "predict"]


@dataclass(frozen=True)
class ComputeProfile:
    """A step without exchange, ms.

    Args:
        forward_ms: Everything before backward.
        backward_ms: From the beginning of backward until its last gradient is there.
        optimizer_ms: Everything after backward.
        ready: ``(elements, ms)``: how many gradients are there how long after the beginning of backward, ascending.
            Empty: gradients arrive evenly.
        contention: Part of a codec's time by which computing is delayed: 1 where both share a core (or a GPU), 0 where
            the codec has a core of its own.

    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    ready: Sequence[tuple[int, float]] = ()
    contention: float = 1.0

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    def ready_ms(self, numel: int, total: int) -> float:
        """Time from the beginning of backward until the first ``numel`` of ``total`` gradients are there."""
        if not self.ready:
            return self.backward_ms * numel / total
        place = bisect_left([elements for elements, _ in self.ready], numel)
        return min(self.ready[min(place, len(self.ready) - 1)][1], self.backward_ms)


@dataclass(frozen=True)
class Prediction:
    """What a plan will give.

    Args:
        step_ms: Duration of a step.
        exposed_ms: Its excess over the same step without exchange.
        sent_bytes: That a rank sends a step, inside nodes and between them.
        transfer_ms: Time for which bytes alone keep the links busy, latency not counted.
        codec_ms: Time spent encoding, decoding, packing.

    """

    step_ms: float
    exposed_ms: float
    sent_bytes: float
    transfer_ms: float
    codec_ms: float


def predict(profile: ComputeProfile, link: Link, plan: Plan) -> Prediction:
    """Return what a step will take.

    Buckets become ready at ``r_j`` and are exchanged one after the other; each takes ``C_j`` in the codec and ``W_j``
    on the wire. What codec and network take from the core that computes, ``D_j = contention C_j + stolen_j``, delays
    computing, and with it every later bucket::

        E_j = max(r_j + sum_{i<j} D_i, E_{j-1}) + C_j + W_j
        T   = T_fwd + T_opt + max(E_K, T_bwd + sum_j D_j)

    Where codec and wire overlap, ``E_K`` is the end of the same work in the order in which the engine does it
    (:func:`last_end_overlapped_ms`).

    Args:
        profile: A step without exchange.
        link: The network.
        plan: How gradients are exchanged.

    """
    total, costs = sum(plan.bucket_numels), bucket_costs(link, plan)
    taken = [profile.contention * cost.codec_ms + cost.stolen_ms for cost in costs]
    delays = accumulate(taken[:-1], initial=0.0)
    ready = [
        profile.ready_ms(there, total) + delay
        for there, delay in zip(accumulate(plan.bucket_numels), delays, strict=True)
    ]
    overlaps = plan.overlapped and not isinstance(plan.method, Uncompressed)
    end = (last_end_overlapped_ms if overlaps else last_end_ms)(ready, [cost.legs for cost in costs])
    step_ms = profile.forward_ms + profile.optimizer_ms + max(end, profile.backward_ms + sum(taken))
    return Prediction(
        step_ms=step_ms,
        exposed_ms=step_ms - profile.step_ms,
        sent_bytes=sum(cost.sent_bytes for cost in costs),
        transfer_ms=sum(cost.transfer_ms for cost in costs),
        codec_ms=sum(cost.codec_ms for cost in costs),
    )
