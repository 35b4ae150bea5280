"""Statistics where DDP's own reducer exchanges gradients."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.measure.comm_stats import CommStats, Traffic
from lightning_commopt.measure.timeline import Timeline

__all__ = ["ReducerLog"]

_KEPT = 20_000  # sampled rounds that wait to be compared with those of other ranks


class ReducerLog:
    """Bytes from sizes, times from the rounds of which DDP's reducer keeps a log: the first ten, then every n-th.

    Args:
        ddp: The wrapped module.
        method: What to call the reducer.

    Attributes:
        timeline: Gets the exchange of every round too, while it is set, one round later; on the CPU.

    """

    def __init__(self, ddp: DistributedDataParallel, method: str = "none") -> None:
        self._ddp: DistributedDataParallel | None = None
        self._method = method
        self._world = ddp.process_group.size()
        self.rounds = self._sent_bytes = 0
        self._rounds_read = 0
        self._often = False
        self.timeline: Timeline | None = None
        self.follow(ddp)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (collective, exposed) of a round, ms
        self._round_ms = self._sum_ms = (0.0, 0.0, 0.0)  # collective, exposed, wait
        self._compared = False

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Go on with another reducer, after the module was wrapped again."""
        self._ddp = ddp
        self._iteration = 0
        nbytes = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
        self._round_bytes = 2 * (self._world - 1) * nbytes // self._world
        if self._often:
            self.sample_often()

    def sample_often(self) -> None:
        """Have every round logged on the CPU, where it costs microseconds; every tenth on CUDA, which waits for it."""
        assert self._ddp is not None
        self._often = True
        self._ddp._set_ddp_runtime_logging_sample_rate(10 if self._ddp.device.type == "cuda" else 1)

    def note_round(self) -> None:
        """Count a synchronising backward, and keep its times when they were logged. The log lags one round behind."""
        assert self._ddp is not None
        self.rounds += 1
        self._sent_bytes += self._round_bytes
        log: dict[str, Any] = self._ddp._get_ddp_logging_data()
        if (iteration := int(log.get("iteration", 0))) == self._iteration:
            return
        self._iteration = iteration
        collective_ms = log.get("backward_comm_time", 0) / 1e6
        overlap_ms = log.get("backward_compute_comm_overlap_time", 0) / 1e6
        self._samples.append((collective_ms, max(0.0, collective_ms - overlap_ms)))
        if self.timeline is not None and self._ddp.device.type == "cpu":
            start = log["backward_comm_time_start"]
            to_clock = time.perf_counter() - time.time()  # the log has the time of day
            self.timeline.add("collective", *(ns / 1e9 + to_clock for ns in (start, log["backward_comm_time_end"])))

    def compare_waiting(self, all_gather: Callable[[list[float]], list[list[float]]]) -> None:
        """Tell waiting from transfer as :meth:`Recorder.compare_waiting` does, by round. A collective."""
        everyone = all_gather([collective for collective, _ in self._samples])
        transfers_ms = [min(durations) for durations in zip(*everyone, strict=True)]
        self._add_rounds(sum(transfers_ms) / len(transfers_ms) if transfers_ms else None)
        self._compared = True

    def stats(self) -> CommStats:
        """Return the sums so far."""
        if not self._compared:
            self._add_rounds(None)
        collective_ms, exposed_ms, wait_ms = self._sum_ms
        return CommStats(
            method=self._method,
            world_size=self._world,
            rounds=self.rounds,
            promised=Traffic(payload=self._sent_bytes),
            sent_bytes=self._sent_bytes,
            dense_bytes=self._sent_bytes,
            collective_ms=collective_ms,
            wait_ms=wait_ms if self._compared else None,
            exposed_ms=exposed_ms,
        )

    def close(self) -> None:
        """Let go of the module; statistics stay readable."""
        self._ddp = None

    def _add_rounds(self, transfer_ms: float | None) -> None:
        """Add the rounds since the last time, each as long as the average of those sampled, else as long as before."""
        if self._samples:
            collective_ms, exposed_ms = (sum(times) / len(self._samples) for times in zip(*self._samples, strict=True))
            self._round_ms = collective_ms, exposed_ms, 0.0 if transfer_ms is None else collective_ms - transfer_ms
            self._samples.clear()
        rounds, self._rounds_read = self.rounds - self._rounds_read, self.rounds
        first, second, third = (total + rounds * ms for total, ms in zip(self._sum_ms, self._round_ms, strict=True))
        self._sum_ms = first, second, third
