"""The part of the strategy that makes ranks fail together."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.failure.checks import Reached, check_output
from lightning_commopt.failure.guard import guard_launcher, release_children
from lightning_commopt.failure.node_watch import NodeWatch
from lightning_commopt.failure.phase import Phase
from lightning_commopt.failure.watch import Limits, Watch
from lightning_commopt.routes import ControlGroup

__all__ = ["FailTogether", "FailTogetherDDP"]


class FailTogether(ParallelStrategy):
    """When a rank fails, all end, and all say the same. For a strategy to derive from, before one of Lightning's.

    Every run of several ranks has a :class:`Watch` from the time when its processes have met until teardown. No
    collective is begun once a rank has failed.
    """

    _timeout: timedelta | None

    stall_timeout: float | timedelta | None = None
    watch: Watch | None = None
    _limits = Limits()

    _control_group: tuple[object, ControlGroup] | None = None

    @property
    def _control(self) -> ControlGroup:
        """The control group of all ranks, made once for each default process group, whatever ranks' options are."""
        world = dist.group.WORLD
        if self._control_group is None or self._control_group[0] is not world:
            self._control_group = (world, ControlGroup(self._timeout))
        return self._control_group[1]

    @property
    def _stall_s(self) -> float:
        """Seconds that a rank may hold up training while it lives."""
        limit = self.stall_timeout or self._timeout or default_pg_timeout
        return limit.total_seconds() if isinstance(limit, timedelta) else limit

    @property
    def _is_leaving(self) -> bool:
        """Whether this rank is on its way out with an error, and nobody is to be waited for.

        Raises:
            RankFailure: Another rank failed, and this one is to leave too.

        """
        if self.watch is None:
            return False
        self.watch.check()
        return self.watch.failing

    # ---- from set-up to teardown ----------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        guard_launcher(self)

    def before_launch(self, trainer: "pl.Trainer") -> None:
        """Refuse what can be told from the Trainer, before its launcher starts processes."""

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self.world_size > 1:
            self.watch = Watch(NodeWatch(self._control, self._stall_s, self._limits, lambda: release_children(self)))

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self.watch is not None:
                self.watch.stop()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"watch": None, "_control_group": None}

    # ---- where this rank is ---------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.watch is not None:
            assert self.lightning_module is not None
            self.watch.begin_batch(self.lightning_module.trainer.global_step)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is None:
            return super().training_step(*args, **kwargs)
        self.watch.enter(Phase.TRAINING_STEP)
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            check_output(output, self.lightning_module)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.watch is not None:
            self.watch.enter(Phase.BACKWARD)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        if (watch := self.watch) is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def then_step() -> Any:
            loss = closure()
            watch.enter(Phase.OPTIMIZER_STEP)
            return loss

        output = super().optimizer_step(optimizer, then_step, model, **kwargs)
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        watch.enter(Phase.BETWEEN_BATCHES if automatic else Phase.TRAINING_STEP)
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.watch is not None:
            self.watch.enter(Phase.VALIDATION)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.watch is not None:
            self.watch.enter(Phase.BETWEEN_BATCHES)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.watch is not None:  # a checkpoint begins
            self.watch.enter(Phase.CHECKPOINT)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: "str | Path", storage_options: Any = None) -> None:
        if self.watch is None:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        self.watch.enter(Phase.CHECKPOINT)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.watch.enter(Phase.BETWEEN_BATCHES)
        return None

    # ---- collectives, while they can succeed ----------------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_leaving:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # Lightning's strategy comes next

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._is_leaving else super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._is_leaving else super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]


class FailTogetherDDP(FailTogether, DDPStrategy):
    """The same for data parallel training, where DDP's own reducer may wait for gradients in vain."""

    _reached: Reached | None = None

    def _watch_reducer(self) -> None:
        """See to it that a backward which DDP's own reducer waits for in vain is an error."""
        ddp, module = self.model, self.lightning_module
        assert isinstance(ddp, DistributedDataParallel)
        assert module is not None
        usual = module.automatic_optimization and not is_overridden("backward", module)
        if self._reached is not None:
            self._reached.close()
            self._reached = None
        if self.watch is not None and usual and not ddp.find_unused_parameters and not ddp.static_graph:
            self._reached = Reached(ddp)

    @override
    def teardown(self) -> None:
        if self._reached is not None:
            self._reached.close()
        self._reached = None
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_reached": None}

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        reached, model = self._reached, self.model
        if reached is None or not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        reached.begin()
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        reached.check(self.lightning_module)
        return loss
