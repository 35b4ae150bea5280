"""Where statistics of the gradient exchange come from, under each kind of strategy."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_commopt.measure import CommStats, reducer_stats
from lightning_commopt.routes import ControlGroup
from lightning_commopt.strategies import CommOptStrategy

__all__ = ["CommSource", "is_measurable", "source_for"]


class CommSource(ABC):
    """Tells what the exchange did, and carries small objects between ranks.

    Args:
        may_skip: Whether a gradient scaler may skip optimizer steps.

    """

    def __init__(self, may_skip: bool = False) -> None:
        self.may_skip = may_skip

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank."""

    @abstractmethod
    def gather_stats(self) -> list[CommStats]:
        """Return every rank's sums since the fit began. A collective."""

    def skipped_steps(self, stats: CommStats) -> int | None:
        """Return the optimizer steps that were skipped according to statistics; None where nobody counts them."""
        return None if self.may_skip else 0

    def note_backward(self) -> None:  # noqa: B027 - most sources need no notes
        """Take note that a backward pass has ended."""

    def close(self) -> None:  # noqa: B027 - most sources made nothing
        """Free what was made for the fit."""


class OneProcess(CommSource):
    """Nobody to talk to."""

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    @override
    def gather_stats(self) -> list[CommStats]:
        return [CommStats(method="none", world_size=1)]


class CommOptSource(CommSource):
    """Our own gradient path: everything is counted where it happens."""

    def __init__(self, strategy: CommOptStrategy, may_skip: bool) -> None:
        super().__init__(may_skip)
        self._strategy = strategy

    @override
    def skipped_steps(self, stats: CommStats) -> int | None:
        """On CUDA a gradient scaler's verdict stays on the device, and is not counted."""
        return None if self.may_skip and self._strategy.root_device.type == "cuda" else stats.skipped_steps

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._strategy._control.all_gather(value)

    @override
    def gather_stats(self) -> list[CommStats]:
        return self._strategy.gather_comm_stats()


class ReducerSource(CommSource):
    """DDP's own reducer: bytes from sizes, times from the rounds that it samples.

    Args:
        ddp: The wrapped module.
        control: Carries objects between ranks.
        method: What to call it.
        may_skip: Whether a gradient scaler may skip steps.
        hooked: Whether a hook of the user encodes gradients, so that nobody knows how many bytes are sent.
        owns_control: Whether ``control`` was made for this fit.

    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        control: ControlGroup,
        method: str,
        *,
        may_skip: bool,
        hooked: bool = False,
        owns_control: bool = False,
    ) -> None:
        super().__init__(may_skip)
        self._ddp, self._control, self._method = ddp, control, method
        self._hooked, self._owns_control = hooked, owns_control
        ddp._set_ddp_runtime_logging_sample_rate(10 if ddp.device.type == "cuda" else 1)  # CUDA waits for the device
        self._iteration = self._rounds = self._rounds_read = 0
        self._samples: deque[tuple[float, float]] = deque(maxlen=20_000)  # (collective, exposed) of a round, in ms
        self._round_ms = self._sum_ms = (0.0, 0.0, 0.0)  # collective, exposed, wait

    @override
    def note_backward(self) -> None:
        """Keep the last round's times, when the reducer has sampled it. The log lags one round behind."""
        self._rounds += self._ddp.require_backward_grad_sync
        log = self._ddp._get_ddp_logging_data()
        if (iteration := int(log.get("iteration", 0))) == self._iteration:
            return
        self._iteration = iteration
        collective_ms = log.get("backward_comm_time", 0) / 1e6
        overlap_ms = log.get("backward_compute_comm_overlap_time", 0) / 1e6
        self._samples.append((collective_ms, max(0.0, collective_ms - overlap_ms)))

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._control.all_gather(value)

    @override
    def gather_stats(self) -> list[CommStats]:
        everyone = self._control.all_gather([collective for collective, _ in self._samples])
        self._add_rounds([min(durations) for durations in zip(*everyone, strict=True)])
        collective_ms, exposed_ms, wait_ms = self._sum_ms
        stats = reducer_stats(self._ddp, self._control.world, self._rounds, self._method)
        stats = replace(stats, collective_ms=collective_ms, exposed_ms=exposed_ms, wait_ms=wait_ms)
        return self._control.all_gather(replace(stats, sent_bytes=0) if self._hooked else stats)

    @override
    def close(self) -> None:
        if self._owns_control:
            dist.destroy_process_group(self._control.group)

    def _add_rounds(self, transfers_ms: list[float]) -> None:
        """Add the rounds since the last time; each counts as the average of those sampled, else as long as before."""
        if self._samples:
            collective_ms, exposed_ms = (sum(times) / len(self._samples) for times in zip(*self._samples, strict=True))
            self._round_ms = collective_ms, exposed_ms, collective_ms - sum(transfers_ms) / len(transfers_ms)
            self._samples.clear()
        rounds, self._rounds_read = self._rounds - self._rounds_read, self._rounds
        first, second, third = (total + rounds * ms for total, ms in zip(self._sum_ms, self._round_ms, strict=True))
        self._sum_ms = first, second, third


def is_measurable(trainer: "pl.Trainer") -> bool:
    """Say whether :func:`source_for` knows the Trainer's strategy."""
    return trainer.world_size == 1 or isinstance(trainer.strategy, DDPStrategy)


def source_for(trainer: "pl.Trainer") -> CommSource:
    """Return the source for a Trainer that is about to train. A collective under Lightning's own strategy."""
    strategy = trainer.strategy
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    may_skip = scaler is not None and scaler.is_enabled()
    if trainer.world_size == 1:
        return OneProcess(may_skip)
    if isinstance(strategy, CommOptStrategy) and strategy._path is not None:
        return CommOptSource(strategy, may_skip)
    assert isinstance(strategy, DDPStrategy)
    assert isinstance(strategy.model, DistributedDataParallel)
    if isinstance(strategy, CommOptStrategy):
        return ReducerSource(strategy.model, strategy._control, strategy.compression.name, may_skip=may_skip)
    control = ControlGroup(strategy._timeout)
    hook = strategy._ddp_comm_hook if strategy.root_device.type == "cuda" else None  # Lightning drops it elsewhere
    method = "ddp" if hook is None else f"ddp, hook {getattr(hook, '__name__', hook)}"
    return ReducerSource(strategy.model, control, method, may_skip=may_skip, hooked=hook is not None, owns_control=True)
