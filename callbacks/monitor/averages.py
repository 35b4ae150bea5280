"""From every rank's counters to averages a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.callbacks.monitor.host import HostCounters
from lightning_commopt.callbacks.monitor.step_clock import StepCounters
from lightning_commopt.measure import CommStats

__all__ = ["WARM_UP_STEPS", "RankCounters", "RankTimes", "StepAverages", "averages_between"]

WARM_UP_STEPS = 3
"""Steps of a fit that are not averaged: imports, lazy initialisation, DDP's first round in one bucket."""

_LOGGED = (
    "samples_per_s",
    "samples_per_s_per_rank",
    "step_ms",
    "compute_ms",
    "exposed_comm_ms",
    "waiting_ms",
    "transfer_ms",
    "comm_ratio",
    "waiting_ratio",
    "overlap_ratio",
    "scaling_efficiency",
    "slowest_rank",
    "sent_mb_per_step",
    "sent_payload_mb_per_step",
    "sent_exact_mb_per_step",
    "sent_header_mb_per_step",
    "sent_inside_node_mb_per_step",
    "compression_ratio",
    "compression_error",
    "gpu_busy_ratio",
    "gpu_memory_mb",
    "gpu_pcie_mb_per_s",
    "gpu_nvlink_mb_per_step",
    "cpu_busy_cores",
    "host_network_sent_mb_per_step",
    "host_network_received_mb_per_step",
)
_KINDS = ("payload", "exact", "header", "inside_node")


@dataclass(frozen=True)
class RankCounters:
    """What one rank has counted since the fit began. ``later - earlier`` gives the steps between.

    Args:
        clock: Wall time and samples.
        stats: The gradient exchange.
        host: The device and the host.

    """

    clock: StepCounters
    stats: CommStats
    host: HostCounters = HostCounters()

    def __sub__(self, earlier: "RankCounters") -> "RankCounters":
        return RankCounters(self.clock - earlier.clock, self.stats - earlier.stats, self.host - earlier.host)


@dataclass(frozen=True)
class RankTimes:
    """An average optimizer step of one rank: ``step = compute + exposed_comm + waiting``.

    Args:
        step_ms: Wall time.
        compute_ms: The rest after communication and waiting: forward, backward, optimizer, data loading, logging.
        exposed_comm_ms: Time in which backward had nothing left to compute and gradients were still travelling.
        waiting_ms: Time in which this rank waited for a slower one, in the gradient exchange or in Lightning's own
            broadcast before each batch.
        samples_per_s: Samples a second of this rank; None where a batch did not tell its size.

    """

    step_ms: float
    compute_ms: float
    exposed_comm_ms: float
    waiting_ms: float
    samples_per_s: float | None = None


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
        transfer_ms: Time in a step for which gradients were on their way, hidden behind backward or not, waiting for
            slower ranks left out: of each collective the shortest duration over ranks.
        overlap_ratio: Part of the exchange (encoding, collectives, decoding) that was hidden behind backward; None
            where nothing was exchanged.
        sent_mb_per_step: Megabytes (1e6 bytes) that one rank sends in a step.
        sent_payload_mb_per_step: The part of it that is encoded gradients.
        sent_exact_mb_per_step: Gradients that travel exactly.
        sent_header_mb_per_step: Flags and padding.
        sent_inside_node_mb_per_step: What travels inside a node; where the model is sharded, parameters too.
        dense_mb_per_step: Those that plain DDP would send.
        compression_ratio: Those of plain DDP over those sent, without what stays inside a node.
        compression_error: Largest ``||residual|| / ||input||`` of a bucket on any rank, when last sampled.
        gpu_busy_ratio: Part of the time in which the GPU ran a kernel (NVML's utilisation), mean over ranks.
        gpu_memory_mb: Memory in use on the fullest GPU, of all processes there.
        gpu_pcie_mb_per_s: MB a second over PCIe in both directions, mean over ranks and samples.
        gpu_nvlink_mb_per_step: MB in a step over the NVLinks of a GPU in both directions, whoever sent them, mean over
            ranks.
        cpu_busy_cores: Cores that a rank's own process keeps busy: processor time of all its threads over the time of
            its steps. Mean over ranks.
        host_network_sent_mb_per_step: MB in a step that the network cards of rank 0's whole host sent, whoever sent
            them; loopback left out.
        host_network_received_mb_per_step: Those that they received.
        by_rank: The times of each rank.

    """

    measured_steps: int = 0
    samples_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    exposed_comm_ms: float | None = None
    waiting_ms: float | None = None
    transfer_ms: float | None = None
    overlap_ratio: float | None = None
    sent_mb_per_step: float | None = None
    sent_payload_mb_per_step: float | None = None
    sent_exact_mb_per_step: float | None = None
    sent_header_mb_per_step: float | None = None
    sent_inside_node_mb_per_step: float | None = None
    dense_mb_per_step: float | None = None
    compression_ratio: float | None = None
    compression_error: float | None = None
    gpu_busy_ratio: float | None = None
    gpu_memory_mb: float | None = None
    gpu_pcie_mb_per_s: float | None = None
    gpu_nvlink_mb_per_step: float | None = None
    cpu_busy_cores: float | None = None
    host_network_sent_mb_per_step: float | None = None
    host_network_received_mb_per_step: float | None = None
    by_rank: tuple[RankTimes, ...] = ()

    @property
    def samples_per_s_per_rank(self) -> float | None:
        """Samples a second of one rank, on average."""
        return None if self.samples_per_s is None else self.samples_per_s / len(self.by_rank)

    @property
    def comm_ratio(self) -> float | None:
        """Part of a step that is exposed communication."""
        return _ratio(self.exposed_comm_ms, self.step_ms)

    @property
    def waiting_ratio(self) -> float | None:
        """Part of a step that is waiting for slower ranks."""
        return _ratio(self.waiting_ms, self.step_ms)

    @property
    def scaling_efficiency(self) -> float | None:
        """Throughput over that of as many ranks that need not talk to each other: compute over step."""
        return _ratio(self.compute_ms, self.step_ms)

    @property
    def slowest_rank(self) -> int | None:
        """The rank that computes longest; None for one process."""
        if len(self.by_rank) < 2:
            return None
        return max(range(len(self.by_rank)), key=lambda rank: self.by_rank[rank].compute_ms)

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
    between = sent - _mean([r.stats.promised.inside_node for r in ranks])
    counted = bool(sent or not dense)
    errors = [rank.stats.compression_error for rank in ranks if rank.stats.compression_error is not None]
    transfers = [rank.stats.transfer_ms for rank in ranks if rank.stats.transfer_ms is not None]
    exchange = _mean([_exchange_ms(rank.stats) for rank in ranks])
    exposed = _mean([rank.stats.exposed_ms for rank in ranks])
    by_kind = {
        f"sent_{kind}_mb_per_step": _mean([getattr(r.stats.promised, kind) for r in ranks]) / steps / 1e6
        for kind in _KINDS
        if counted and dense
    }
    network = ranks[0].host.network
    nvlink = _mean_of([rank.host.nvlink_bytes for rank in ranks])
    return StepAverages(
        measured_steps=steps,
        samples_per_s=sum(samples) / seconds if len(samples) == len(ranks) else None,
        step_ms=_mean([t.step_ms for t in times]),
        compute_ms=_mean([t.compute_ms for t in times]),
        exposed_comm_ms=_mean([t.exposed_comm_ms for t in times]),
        waiting_ms=_mean([t.waiting_ms for t in times]),
        transfer_ms=_mean(transfers) / steps if len(transfers) == len(ranks) else None,
        overlap_ratio=min(1.0, max(0.0, 1 - exposed / exchange)) if exchange else None,
        sent_mb_per_step=sent / steps / 1e6 if counted else None,
        **by_kind,
        dense_mb_per_step=dense / steps / 1e6,
        compression_ratio=dense / between if between else None,
        compression_error=max(errors, default=None),
        gpu_busy_ratio=_mean_of([rank.host.gpu_busy_ratio for rank in ranks]),
        gpu_memory_mb=max((r.host.gpu_memory_mb for r in ranks if r.host.gpu_memory_mb is not None), default=None),
        gpu_pcie_mb_per_s=_mean_of([rank.host.gpu_pcie_mb_per_s for rank in ranks]),
        gpu_nvlink_mb_per_step=None if nvlink is None else nvlink / steps / 1e6,
        cpu_busy_cores=_mean([rank.clock.cpu_seconds for rank in ranks]) / seconds,
        host_network_sent_mb_per_step=None if network is None else network.sent_bytes / steps / 1e6,
        host_network_received_mb_per_step=None if network is None else network.received_bytes / steps / 1e6,
        by_rank=times,
    )


def _times(rank: RankCounters) -> RankTimes:
    """Split a rank's steps; of the exposed time, that share was waiting that was waiting in the whole exchange."""
    stats, steps = rank.stats, rank.clock.steps
    exchange_ms = _exchange_ms(stats)
    waiting_share = min(1.0, max(0.0, (stats.wait_ms or 0.0) / exchange_ms)) if exchange_ms > 0 else 0.0
    step_ms, exposed_ms = rank.clock.seconds * 1e3 / steps, stats.exposed_ms / steps
    barrier_ms = rank.clock.barrier_seconds * 1e3 / steps
    return RankTimes(
        step_ms=step_ms,
        compute_ms=max(0.0, step_ms - exposed_ms - barrier_ms),
        exposed_comm_ms=exposed_ms * (1 - waiting_share),
        waiting_ms=exposed_ms * waiting_share + barrier_ms,
        samples_per_s=None if rank.clock.samples is None else rank.clock.samples / rank.clock.seconds,
    )


def _exchange_ms(stats: CommStats) -> float:
    return stats.encode_ms + stats.collective_ms + stats.decode_ms


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
