"""What a strategy lets callbacks see of a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commopt.callbacks.monitor.replicas import first_difference, first_differing
from lightning_commopt.strategies import (
    CommOptDeepSpeedStrategy,
    CommOptPipelineStrategy,
    CommOptShardedStrategy,
    CommOptStrategy,
)

__all__ = ["ModelView", "view_for"]

AllGather = Callable[[Any], list[Any]]


class ModelView:
    """A model of which every rank holds everything, as under DDP.

    Args:
        trainer: In set-up, or later.

    Attributes:
        begins_alike: Method of the strategy that makes ranks begin with the same parameters.
        beginning: What it does to those that differ.
        in_parts: Why no rank holds all parameters and optimizer states; empty where every rank does.
        not_compared: Why no two ranks hold the same parameters; empty where some do.
        every_backward: Whether gradients are exchanged in every backward pass, whatever is accumulated.

    """

    begins_alike: ClassVar[str] = "_setup_model"
    beginning: ClassVar[str] = "DDP replaced it by rank 0's"
    in_parts: str = ""
    not_compared: str = ""
    every_backward: bool = False

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer

    @property
    def module(self) -> "pl.LightningModule":
        """The module in training."""
        return self._trainer.lightning_module

    def initial(self) -> dict[str, Tensor] | None:
        """Return parameters and buffers before :attr:`begins_alike`; None where they are in parts already."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @contextmanager
    def whole_parameters(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Show the tensors whose hooks see this rank's own gradients. A collective where they are in parts."""
        yield iter(self.module.named_parameters())

    def first_difference(self, all_gather: AllGather) -> tuple[str, tuple[int, ...]] | None:
        """Return the first parameter that differs between replicas, and the ranks where it does. A collective.

        Args:
            all_gather: Returns every rank's object, by rank.

        """
        return first_difference(self.module, all_gather)

    def loss_scale(self) -> Tensor | float | None:
        """Return by what gradients are multiplied now; None where nothing scales them."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return scaler._scale.clone() if scaler is not None and scaler.is_enabled() else None

    def encoded_exchanges(self) -> int:
        """Return how many buffers of gradients have travelled encoded on our own path."""
        strategy = self._trainer.strategy
        return strategy.comm_stats().hook_calls if isinstance(strategy, CommOptStrategy) else 0


class ShardedView(ModelView):
    """Shards of FSDP2; ranks with the same shard are replicas."""

    begins_alike = "_shard"
    beginning = "each shard is now that of the first replica"
    in_parts = "ranks hold shards of parameters and optimizer states"

    def __init__(self, trainer: "pl.Trainer", strategy: CommOptShardedStrategy) -> None:
        super().__init__(trainer)
        self._strategy = strategy

    @property
    @override
    def not_compared(self) -> str:  # type: ignore[override]
        alone = self._trainer.world_size > 1 and self._strategy.replicas == 1
        return "all ranks share one replica: no two hold the same shard" if alone else ""

    @override
    def initial(self) -> dict[str, Tensor] | None:
        named = super().initial()
        assert named is not None
        return None if any(isinstance(t, DTensor) or t.is_meta for t in named.values()) else named

    @contextmanager
    @override
    def whole_parameters(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """One group of FSDP2 after the other is gathered: hooks on shards would never be called."""

        def gathered() -> Iterator[tuple[str, Tensor]]:
            seen = set()
            for prefix, module in self.module.named_modules():
                if not isinstance(module, FSDPModule):
                    continue
                module.unshard()
                for name, parameter in module.named_parameters(prefix):
                    if not isinstance(parameter, DTensor) and id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield name, parameter
                module.reshard()

        yield gathered()

    @override
    def first_difference(self, all_gather: AllGather) -> tuple[str, tuple[int, ...]] | None:
        shards = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in self.module.named_parameters()}
        replicas = self._strategy._replicas_control
        found = first_differing(shards, replicas.all_gather)
        own = None if found is None else (found[0], replicas.rank in found[1])
        everyone = all_gather(own)
        named = [name for name in shards if any(one is not None and one[0] == name for one in everyone)]
        if not named:
            return None
        return named[0], tuple(rank for rank, one in enumerate(everyone) if one == (named[0], True))

    @override
    def encoded_exchanges(self) -> int:
        return self._strategy.comm_stats().hook_calls


class DeepSpeedView(ModelView):
    """DeepSpeed's engine: from stage 1 on optimizer states are in parts, at stage 3 parameters too."""

    begins_alike = "init_deepspeed"
    beginning = "DeepSpeed replaced it by rank 0's"

    def __init__(self, trainer: "pl.Trainer", strategy: CommOptDeepSpeedStrategy) -> None:
        super().__init__(trainer)
        self._strategy = strategy
        self.every_backward = strategy.stage >= 2
        what = ("optimizer states", "optimizer states", "optimizer states", "parameters and optimizer states")
        self.in_parts = f"DeepSpeed keeps {what[strategy.stage]} in a form of its own, in parts from stage 1 on"
        if strategy.stage == 3:
            self.not_compared = "at stage 3 parameters are in parts: no two ranks hold the same"

    @override
    def initial(self) -> dict[str, Tensor] | None:
        named = super().initial()
        assert named is not None
        return None if any(hasattr(tensor, "ds_id") for tensor in named.values()) else named

    @override
    def loss_scale(self) -> Tensor | float | None:
        return getattr(self._strategy.deepspeed_engine.optimizer, "loss_scale", None)

    @override
    def encoded_exchanges(self) -> int:
        stats = self._strategy.comm_stats()
        return stats.hook_calls if stats.method != "none" else 0


def view_for(trainer: "pl.Trainer") -> ModelView | None:
    """Return what can be seen under the Trainer's strategy; None where it is not known."""
    strategy = trainer.strategy
    if isinstance(strategy, CommOptShardedStrategy):
        return ShardedView(trainer, strategy)
    if isinstance(strategy, CommOptDeepSpeedStrategy):
        return DeepSpeedView(trainer, strategy)
    if isinstance(strategy, CommOptPipelineStrategy | DeepSpeedStrategy):
        return None
    known = trainer.world_size == 1 or isinstance(strategy, DDPStrategy)
    return ModelView(trainer) if known else None
