"""From every rank's counters to averages a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.callbacks.monitor.step_clock import StepCounters
from lightning_commopt.measure import CommStats

__all__ = ["WARM_UP_STEPS", "RankCounters", "RankTimes", "StepAverages", "averages_between"]

WARM_UP_STEPS = 3
"""Steps of a fit that are not averaged: imports, lazy initialisation, DDP's first round in one bucket."""

_LOGGED = (
    "samples_per_s",
    "step_ms",
    "compute_ms",
    "exposed_comm_ms",
    "waiting_ms",
    "sent_mb_per_step",
    "compression_ratio",
    "compression_error",
)


@dataclass(frozen=True)
class RankCounters:
    """What one rank has counted since the fit began. ``later - earlier`` gives the steps between.

    Args:
        clock: Wall time and samples.
        stats: The gradient exchange.

    """

    clock: StepCounters
    stats: CommStats

    def __sub__(self, earlier: "RankCounters") -> "RankCounters":
        return RankCounters(self.clock - earlier.clock, self.stats - earlier.stats)


@dataclass(frozen=True)
class RankTimes:
    """An average optimizer step of one rank: ``step = compute + exposed_comm + waiting``.

    Args:
        step_ms: Wall time.
        compute_ms: The rest after communication and waiting: forward, backward, optimizer, data loading, logging.
        exposed_comm_ms: Time in which backward had nothing left to compute and gradients were still travelling.
        waiting_ms: Time in which this rank waited for a slower one, in the gradient exchange or in Lightning's own
            broadcast before each batch.

    """

    step_ms: float
    compute_ms: float
    exposed_comm_ms: float
    waiting_ms: float


@dataclass(frozen=True)
class StepAverages:
    """Averages over a stretch of optimizer steps and over ranks; None where nothing was measured.

    Args:
        measured_steps: Steps that were averaged.
        samples_per_s: Samples a second of all ranks together.
        step_ms: As in :class:`RankTimes`, like the next three.
        compute_ms: See there.
        exposed_comm_ms: See there.
        waiting_ms: See there.
        sent_mb_per_step: Megabytes (1e6 bytes) that one rank sends in a step.
        dense_mb_per_step: Those that plain DDP would send.
        compression_ratio: The second over the first.
        compression_error: Largest ``||residual|| / ||input||`` of a bucket on any rank, when last sampled.
        by_rank: The times of each rank.

    """

    measured_steps: int = 0
    samples_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    exposed_comm_ms: float | None = None
    waiting_ms: float | None = None
    sent_mb_per_step: float | None = None
    dense_mb_per_step: float | None = None
    compression_ratio: float | None = None
    compression_error: float | None = None
    by_rank: tuple[RankTimes, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return what was measured, under the names that loggers get."""
        return {f"commopt/{name}": value for name in _LOGGED if (value := getattr(self, name)) is not None}


def averages_between(earlier: Sequence[RankCounters], later: Sequence[RankCounters]) -> StepAverages:
    """Average the steps between two collections of every rank's counters, both by rank."""
    ranks = [after - before for before, after in zip(earlier, later, strict=True)]
    steps = ranks[0].clock.steps
    if steps == 0:
        return StepAverages()
    times = tuple(_times(rank) for rank in ranks)
    seconds = _mean([rank.clock.seconds for rank in ranks])
    samples = [rank.clock.samples for rank in ranks if rank.clock.samples is not None]
    sent, dense = (_mean([getattr(r.stats, kind) for r in ranks]) for kind in ("sent_bytes", "dense_bytes"))
    errors = [rank.stats.compression_error for rank in ranks if rank.stats.compression_error is not None]
    return StepAverages(
        measured_steps=steps,
        samples_per_s=sum(samples) / seconds if len(samples) == len(ranks) else None,
        step_ms=_mean([t.step_ms for t in times]),
        compute_ms=_mean([t.compute_ms for t in times]),
        exposed_comm_ms=_mean([t.exposed_comm_ms for t in times]),
        waiting_ms=_mean([t.waiting_ms for t in times]),
        sent_mb_per_step=sent / steps / 1e6 if sent or not dense else None,
        dense_mb_per_step=dense / steps / 1e6,
        compression_ratio=dense / sent if sent else None,
        compression_error=max(errors, default=None),
        by_rank=times,
    )


def _times(rank: RankCounters) -> RankTimes:
    """Split a rank's steps; of the exposed time, that share was waiting that was waiting in the whole exchange."""
    stats, steps = rank.stats, rank.clock.steps
    exchange_ms = stats.encode_ms + stats.collective_ms + stats.decode_ms
    waiting_share = min(1.0, max(0.0, (stats.wait_ms or 0.0) / exchange_ms)) if exchange_ms > 0 else 0.0
    step_ms, exposed_ms = rank.clock.seconds * 1e3 / steps, stats.exposed_ms / steps
    barrier_ms = rank.clock.barrier_seconds * 1e3 / steps
    return RankTimes(
        step_ms=step_ms,
        compute_ms=max(0.0, step_ms - exposed_ms - barrier_ms),
        exposed_comm_ms=exposed_ms * (1 - waiting_share),
        waiting_ms=exposed_ms * waiting_share + barrier_ms,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
