"""Statistics where DDP's own reducer exchanges gradients."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.measure.comm_stats import CommStats, Traffic

__all__ = ["reducer_stats"]


def reducer_stats(ddp: DistributedDataParallel | None, world_size: int, rounds: int, method: str = "none") -> CommStats:
    """Return what DDP's logger knows of its reducer: sampled times, and the bytes of a ring all-reduce.

    Args:
        ddp: The wrapped module; None when nothing is wrapped.
        world_size: Ranks.
        rounds: Synchronising backward passes so far.
        method: What to call it.

    """
    if ddp is None or world_size == 1:
        return CommStats(method=method, world_size=world_size, rounds=rounds)
    log: dict[str, Any] = ddp._get_ddp_logging_data()
    sent = rounds * (2 * (world_size - 1) * int(log.get("total_parameter_size_bytes", 0)) // world_size)
    comm_ms = log.get("avg_backward_comm_time", 0) / 1e6
    overlap_ms = log.get("avg_backward_compute_comm_overlap_time", 0) / 1e6
    return CommStats(
        method=method,
        world_size=world_size,
        rounds=rounds,
        promised=Traffic(payload=sent),
        sent_bytes=sent,
        dense_bytes=sent,
        collective_ms=rounds * comm_ms,
        exposed_ms=rounds * max(0.0, comm_ms - overlap_ms),
    )
