"""One sentence about what a run is bound by, and one about what to do."""

from typing import NamedTuple

from lightning_commopt.callbacks.monitor.summary import CommSummary

__all__ = ["Verdict", "verdict"]

_WORTH = 0.1  # below this share of a step there is little to win
_BOUND = 0.3  # from here on a step is bound by it


class Verdict(NamedTuple):
    """What bounds a run, and the remedy.

    Args:
        bound_by: ``"communication"``, ``"waiting"``, ``"compute"``, ``"one process"`` or ``"not measured"``.
        finding: A sentence.
        advice: A sentence.

    """

    bound_by: str
    finding: str
    advice: str


def verdict(summary: CommSummary) -> Verdict:
    """Judge the averages of a fit."""
    if summary.step_ms is None:
        return Verdict("not measured", "Too few steps to say what bounds this run.", "Train for some dozen steps.")
    if summary.world_size == 1:
        return Verdict("one process", "One process exchanges nothing.", "Add processes to see what they cost.")
    assert summary.exposed_comm_ms is not None
    assert summary.waiting_ms is not None
    shares = {
        "communication": summary.exposed_comm_ms / summary.step_ms,
        "waiting": summary.waiting_ms / summary.step_ms,
    }
    most = max(shares, key=lambda name: shares[name])
    if shares[most] < _WORTH:
        compute = 100 * (1 - sum(shares.values()))
        return Verdict(
            "compute",
            f"This run is bound by compute: {compute:.0f} % of a step.",
            "Exchanging gradients faster would gain next to nothing. Leave the method as it is.",
        )
    strength = "is bound by" if shares[most] >= _BOUND else "loses time to"
    share = f"{100 * shares[most]:.0f} % of a step"
    if most == "waiting":
        slowest = max(range(summary.world_size), key=lambda rank: summary.by_rank[rank].compute_ms)
        return Verdict(
            most,
            f"This run {strength} waiting for slower ranks: {share}.",
            f"Rank {slowest} computes longest. Look at its data loading, its machine and the length of its samples; no "
            "compression helps.",
        )
    return Verdict(
        most, f"This run {strength} communication: {share}, with no compute left to hide it.", _less(summary)
    )


def _less(summary: CommSummary) -> str:
    if summary.compression_ratio is not None and summary.compression_ratio > 1.5:
        return "Take a method that sends less, accumulate gradients over several batches, or enlarge the batch."
    return "Take a method that sends less: `bf16` halves the bytes, `int8` quarters them."
