"""The shortest possible step, given what is computed and what is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.tuning import ComputeProfile

__all__ = ["Link", "shortest_step_ms"]


@dataclass(frozen=True)
class Link:
    """What joins the ranks.

    Args:
        bits_per_second: In each direction of each rank's link.
        latency_ms: From sending an empty message until it is received.

    """

    bits_per_second: float
    latency_ms: float

    def wire_ms(self, nbytes: float, hops: int) -> float:
        """Time to send ``nbytes`` in ``hops`` messages, one after the other."""
        return nbytes * 8 / self.bits_per_second * 1e3 + hops * self.latency_ms


def shortest_step_ms(
    compute: ComputeProfile,
    link: Link,
    sent_bytes: float,
    bucket_numels: Sequence[int],
    hops: int,
    codec_ms: float = 0.0,
) -> float:
    """Return the lower bound on a step.

    With ``K`` buckets of ``s_j`` elements whose gradients are there at ``r_j`` after the beginning of backward, and
    ``W_j`` the time that bucket ``j`` is on the wire::

        W_j  = S * s_j / sum(s) / B + hops * a
        T_LB = T_fwd + T_opt + max(T_bwd + T_codec + W_K, r_1 + sum_j W_j)

    ``S`` are the bytes that a rank sends a step, measured (a ring all-reduce of ``b`` bytes an element sends
    ``2 (N - 1) / N * s_j * b``), ``B`` the rate of the link, ``a`` its latency. ``T_fwd``, ``T_bwd``, ``T_opt`` and
    ``r_j`` are those of the same ranks without exchange. ``T_codec`` is the CPU time of the thread that encodes and
    decodes: it shares the core with backward. It is known for our modes alone; for the others it counts as zero.

    Args:
        compute: A step without exchange.
        link: The network.
        sent_bytes: ``S``.
        bucket_numels: ``s_j``, in the order in which buckets become ready; empty: nothing is exchanged.
        hops: Messages one after the other that a bucket needs at least: 2, or 1 where all go to all at once.
        codec_ms: ``T_codec``.

    """
    if not bucket_numels:
        return compute.step_ms
    alone = compute.forward_ms + compute.optimizer_ms
    total = sum(bucket_numels)
    wires = [link.wire_ms(sent_bytes * numel / total, hops) for numel in bucket_numels]
    first_ready = compute.ready_ms(bucket_numels[0], total)
    return alone + max(compute.backward_ms + codec_ms + wires[-1], first_ready + sum(wires))
