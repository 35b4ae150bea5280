"""Where statistics of the gradient exchange come from, under each kind of strategy."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_commopt.callbacks.monitor.advice import Situation
from lightning_commopt.callbacks.monitor.views import view_for
from lightning_commopt.measure import CommStats, ReducerLog, Timeline
from lightning_commopt.routes import ControlGroup
from lightning_commopt.strategies import (
    CommOptDeepSpeedStrategy,
    CommOptPipelineStrategy,
    CommOptShardedStrategy,
    CommOptStrategy,
)

__all__ = ["CommSource", "is_measurable", "source_for"]


class CommSource(ABC):
    """Tells what the exchange did, and carries small objects between ranks.

    Args:
        trainer: About to train.
        may_skip: Whether a gradient scaler may skip optimizer steps.

    """

    def __init__(self, trainer: "pl.Trainer", may_skip: bool = False) -> None:
        self.may_skip = may_skip
        self._trainer = trainer
        self.hidden_barrier = True
        """Whether ranks wait for each other before every batch, to hear of a SIGTERM."""

    @property
    def method(self) -> str:
        """What to call what is in force now."""
        return "none"

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank."""

    @abstractmethod
    def gather_stats(self) -> list[CommStats]:
        """Return every rank's sums since the fit began. A collective."""

    def skipped_steps(self, stats: CommStats) -> int | None:
        """Return the optimizer steps that were skipped according to statistics; None where nobody counts them."""
        return None if self.may_skip else 0

    def situation(self) -> Situation:
        """Return what advice depends on."""
        nodes = self._trainer.num_nodes
        return Situation(
            accumulate=self._trainer.accumulate_grad_batches,
            nodes=nodes,
            ranks_per_node=self._trainer.world_size // nodes,
            automatic=self._trainer.lightning_module.automatic_optimization,
        )

    @property
    def replicated(self) -> bool:
        """Whether some ranks hold the same parameters."""
        view = view_for(self._trainer)
        return view is not None and not view.not_compared

    def first_difference(self) -> tuple[str, tuple[int, ...]] | None:
        """Return the first parameter that differs between replicas, and the ranks where it does. A collective."""
        view = view_for(self._trainer)
        assert view is not None
        return view.first_difference(self.all_gather)

    def note_backward(self) -> None:  # noqa: B027 - most sources need no notes
        """Take note that a backward pass has ended."""

    def record(self, timeline: Timeline | None) -> None:  # noqa: B027 - one process exchanges nothing
        """Let the exchange add its spans to a timeline; None ends that."""

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


class StrategySource(CommSource):
    """A strategy of ours: its own statistics, carried by its control group."""

    _strategy: CommOptStrategy | CommOptShardedStrategy | CommOptDeepSpeedStrategy

    @property
    @override
    def method(self) -> str:
        return self._strategy.compression.name

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._strategy._control.all_gather(value)

    @override
    def gather_stats(self) -> list[CommStats]:
        return self._strategy.gather_comm_stats()


class CommOptSource(StrategySource):
    """Our own gradient path: everything is counted where it happens."""

    _strategy: CommOptStrategy

    def __init__(self, trainer: "pl.Trainer", strategy: CommOptStrategy, may_skip: bool) -> None:
        super().__init__(trainer, may_skip)
        self._strategy = strategy
        self.hidden_barrier = strategy._path is None or strategy._is_auto  # `auto` may drop the path

    @override
    def situation(self) -> Situation:
        situation = super().situation()
        bucket_mb = float(self._strategy._ddp_kwargs.get("bucket_cap_mb") or situation.bucket_mb)
        path = self._strategy._path
        return replace(situation, bucket_mb=bucket_mb, hierarchical=path is not None and path.node is not None)

    @override
    def skipped_steps(self, stats: CommStats) -> int | None:
        """A gradient scaler's verdict is not counted on CUDA, where it stays on the device, nor without a method."""
        strategy = self._strategy
        counted = strategy.root_device.type != "cuda" and strategy._path is not None and not strategy._is_auto
        return stats.skipped_steps if counted or not self.may_skip else None

    @override
    def record(self, timeline: Timeline | None) -> None:
        path, log = self._strategy._path, self._strategy._log
        if path is not None:
            path.recorder.timeline = timeline
        elif log is not None:
            log.timeline = timeline


class ShardedSource(StrategySource):
    """Our path between replicas of a sharded model. What travels inside a node is counted, and not timed."""

    _strategy: CommOptShardedStrategy

    def __init__(self, trainer: "pl.Trainer", strategy: CommOptShardedStrategy, may_skip: bool) -> None:
        super().__init__(trainer, may_skip)
        self._strategy = strategy

    @override
    def situation(self) -> Situation:
        """Shards reduce inside nodes, and FSDP2's groups stand in for buckets, which no option sizes."""
        nodes, shards = self._strategy.replicas, self._strategy.shard_mesh.size()
        situation = super().situation()
        return replace(situation, nodes=nodes, ranks_per_node=shards, hierarchical=True, bucket_mb=0.0)

    @override
    def skipped_steps(self, stats: CommStats) -> int | None:
        return None if self.may_skip and self._strategy.root_device.type == "cuda" else stats.skipped_steps

    @override
    def record(self, timeline: Timeline | None) -> None:
        if self._strategy._path is not None:
            self._strategy._path.recorder.timeline = timeline


class DeepSpeedSource(StrategySource):
    """DeepSpeed's sums of gradients, counted where we take them over."""

    _strategy: CommOptDeepSpeedStrategy

    def __init__(self, trainer: "pl.Trainer", strategy: CommOptDeepSpeedStrategy) -> None:
        super().__init__(trainer)
        self._strategy = strategy

    @override
    def record(self, timeline: Timeline | None) -> None:
        if self._strategy._exchange is not None:
            self._strategy._exchange.recorder.timeline = timeline


class ReducerSource(CommSource):
    """DDP's own reducer under Lightning's own strategy.

    Args:
        trainer: About to train.
        ddp: The wrapped module.
        control: Carries objects between ranks; made for this fit.
        method: What to call it.
        may_skip: Whether a gradient scaler may skip steps.
        hooked: Whether a hook of the user encodes gradients, so that nobody knows how many bytes are sent.

    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        ddp: DistributedDataParallel,
        control: ControlGroup,
        method: str,
        *,
        may_skip: bool,
        hooked: bool,
    ) -> None:
        super().__init__(trainer, may_skip)
        self._ddp, self._control, self._hooked, self._method = ddp, control, hooked, method
        self._log = ReducerLog(ddp, method)
        self._log.sample_often()

    @property
    @override
    def method(self) -> str:
        return self._method

    @override
    def note_backward(self) -> None:
        if self._ddp.require_backward_grad_sync:
            self._log.note_round()

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._control.all_gather(value)

    @override
    def gather_stats(self) -> list[CommStats]:
        self._log.compare_waiting(self._control.all_gather)
        stats = self._log.stats()
        return self._control.all_gather(replace(stats, sent_bytes=0) if self._hooked else stats)

    @override
    def record(self, timeline: Timeline | None) -> None:
        self._log.timeline = timeline

    @override
    def close(self) -> None:
        dist.destroy_process_group(self._control.group)


def is_measurable(trainer: "pl.Trainer") -> bool:
    """Say whether :func:`source_for` knows the Trainer's strategy."""
    if isinstance(trainer.strategy, CommOptDeepSpeedStrategy):
        return not trainer.strategy.zero_plus_plus
    if isinstance(trainer.strategy, CommOptPipelineStrategy | DeepSpeedStrategy):
        return False
    return trainer.world_size == 1 or isinstance(trainer.strategy, DDPStrategy | CommOptShardedStrategy)


def source_for(trainer: "pl.Trainer") -> CommSource:
    """Return the source for a Trainer that is about to train. A collective under Lightning's own strategy."""
    strategy = trainer.strategy
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    may_skip = scaler is not None and scaler.is_enabled()
    if trainer.world_size == 1:
        return OneProcess(trainer, may_skip)
    if isinstance(strategy, CommOptShardedStrategy):
        return ShardedSource(trainer, strategy, may_skip)
    if isinstance(strategy, CommOptStrategy):
        if strategy._log is not None:
            strategy._log.sample_often()
        return CommOptSource(trainer, strategy, may_skip)
    if isinstance(strategy, CommOptDeepSpeedStrategy):
        return DeepSpeedSource(trainer, strategy)
    assert isinstance(strategy, DDPStrategy)
    assert isinstance(strategy.model, DistributedDataParallel)
    hook = strategy._ddp_comm_hook if strategy.root_device.type == "cuda" else None  # Lightning drops it elsewhere
    method = "ddp" if hook is None else f"ddp, hook {getattr(hook, '__name__', hook)}"
    control = ControlGroup(strategy._timeout)
    return ReducerSource(trainer, strategy.model, control, method, may_skip=may_skip, hooked=hook is not None)
