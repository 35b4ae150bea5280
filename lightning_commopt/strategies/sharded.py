"""The hybrid sharded strategy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.compression import Compression, Uncompressed, method_named
from lightning_commopt.measure import CommStats
from lightning_commopt.routes import Hierarchy, discover
from lightning_commopt.sharded import InsideNode, ShardedPath, ShardGroups, Wrap
from lightning_commopt.sharded.codecs import GATHER, SCATTER, check_inside, codec_inside
from lightning_commopt.sharded.old_references import OldReferences
from lightning_commopt.sharded.parameters import begin_alike, sharded_modules
from lightning_commopt.sharded.toggles import Toggles
from lightning_commopt.sharded.wrap import (
    announce_backward,
    explain_uncalled,
    gather_again,
    shard_unless_sharded,
    sharded_by_us,
)
from lightning_commopt.strategies.applied_steps import AppliedSteps
from lightning_commopt.strategies.elastic import join_restarted
from lightning_commopt.strategies.nccl import NcclOptions, nccl_variables, set_nccl_variables
from lightning_commopt.strategies.nonfinite import Nonfinite, raise_named
from lightning_commopt.strategies.other_lightning import import_hint
from lightning_commopt.strategies.preflight import check_devices, check_optimizers, device_name, warn_of_mixed_devices
from lightning_commopt.strategies.residual_checkpoint import ResidualCheckpoint, ResidualPolicy
from lightning_commopt.strategies.sharded_checkpoint import ShardedCheckpoint
from lightning_commopt.strategies.sharded_checks import (
    check_callbacks,
    check_groups,
    check_references,
    check_sharded_options,
    explain_sharded,
    refuse_sizes,
    shard_size,
    sharded_fingerprint,
)
from lightning_commopt.strategies.short_window import ShortWindow
from lightning_commopt.strategies.told_step import told_step
from lightning_commopt.uneven import UnevenBatches

__all__ = ["CommOptShardedStrategy"]


class CommOptShardedStrategy(ShardedCheckpoint):
    """Hybrid sharded data parallel (FSDP2): shards inside a node, compressed gradient exchange between nodes.

    Each node holds one replica of the model. Its ranks share parameters, gradients and optimizer state, which FSDP2
    gathers and reduces over the links of the node, in full precision or encoded (``shard_gather``, ``shard_scatter``).
    Ranks with the same shard then exchange its gradient between nodes, by the methods and routes of
    :class:`CommOptStrategy`, once an optimizer step.

    The LightningModule stays as it is, and is sharded by ``wrap``. Or its `configure_model` shards it, with
    ``fully_shard(module, mesh=self.device_mesh["shard"])``. Buffers (such as those of batch norms) begin alike and are
    then each rank's own, as always under FSDP2. A parameter that no rank uses in a step has no gradient in
    it, as under ``find_unused_parameters=True``, and optimizers leave it alone; ranks of a node agree on that by one
    small all-reduce a step. :meth:`comm_stats` counts what travels between replicas.

    Args:
        compression: As in :class:`CommOptStrategy`, but for ``"auto"``.
        wrap: What FSDP2 gathers and reduces at once: a list of module classes (or their names, such as
            ``["TransformerBlock"]``), or the smallest number of parameters that make a module a group. None for a
            million. What is left over is one group.
        shard_gather: How matrices are encoded when the ranks of a node gather parameters: ``"bf16"``, ``"int8"``, or
            with options (``Int8(block=64, stochastic=True)``). The optimizer's shards keep all their bits; forward and
            backward, also of a validation, see what was sent. None: not at all.
        shard_scatter: How matrices are encoded when the ranks of a node reduce gradients: ``"bf16"``, ``"int8"``,
            ``"int4"``, or with options; from the first step on. The last two keep a residual, which is fp32 memory for
            the *whole* model on every rank, twice where a step may be skipped. None: not at all.
        hierarchy: ``"auto"``: the ranks of a node share a replica. A number: so many consecutive ranks do.
        sync: When replicas meet: ``"every_step"``.
        start_step: As in :class:`CommOptStrategy`.
        nonfinite: As in :class:`CommOptStrategy`. All ranks agree, by one small all-reduce a step under ``"error"`` and
            ``"skip"``.
        residuals: As in :class:`CommOptStrategy`.
        true_mean: As in :class:`CommOptStrategy`.
        uneven: ``"error"`` or ``"trim"``, as in :class:`CommOptStrategy`, and for evaluation as well: a forward gathers
            parameters, so that ranks run as many of them.
        stall_timeout: As in :class:`CommOptStrategy`.
        nccl: As in :class:`CommOptStrategy`.
        save_distributed_checkpoint: True: a checkpoint is a folder to which each rank writes its shards. False: one
            file of rank 0 with the whole weights and optimizer state, which a Trainer of one process loads, too.
        **kwargs: ``process_group_backend`` and ``timeout``, as for
            :class:`~lightning.pytorch.strategies.ModelParallelStrategy`.

    Raises:
        ValueError: An option is out of its bounds, or cannot be honoured; the message says what to do instead.

    """

    def __init__(
        self,
        compression: Compression | str = "bf16",
        wrap: Wrap = None,
        *,
        shard_gather: Compression | str | None = None,
        shard_scatter: Compression | str | None = None,
        hierarchy: Hierarchy = "auto",
        sync: str = "every_step",
        start_step: int | None = None,
        nonfinite: Nonfinite | None = None,
        residuals: ResidualPolicy | None = None,
        true_mean: bool = False,
        uneven: Literal["error", "trim"] = "error",
        stall_timeout: float | timedelta | None = None,
        nccl: NcclOptions | None = None,
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse_sizes(kwargs)
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)
        if compression == "auto":
            raise ValueError("`compression='auto'` measures DDP only: choose a method for a sharded model, or 'none'.")
        self.compression = method_named(compression)
        self.wrap = wrap
        self.hierarchy = hierarchy
        self.sync = sync
        self.nccl = nccl_variables(nccl)
        self.start_step = self.compression.default_start_step if start_step is None else start_step
        self.shard_gather = codec_inside("shard_gather", shard_gather, GATHER)
        self.shard_scatter = codec_inside("shard_scatter", shard_scatter, SCATTER)
        self._keeps_residuals = any(m and m.error_feedback for m in (self.compression, self.shard_scatter))
        self.nonfinite: Nonfinite = nonfinite or ("error" if self._keeps_residuals else "propagate")
        self.true_mean = true_mean
        self.stall_timeout = stall_timeout
        check_sharded_options(self, start_step, nonfinite, residuals)
        self._short_window = ShortWindow(true_mean)
        self._uneven = UnevenBatches(uneven, joins=False)
        inside = "" if self.shard_scatter is None else f", inside nodes {self.shard_scatter!r}"
        self._checkpoint = ResidualCheckpoint(residuals, f"{self.compression!r}{inside}")
        self._path = None
        self._shards: ShardGroups | None = None
        self._steps: AppliedSteps | None = None
        self._inside: InsideNode | None = None  # where there is no path
        self._toggles: Toggles | None = None  # under manual optimisation
        self._deferred = False

    # ---- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        check_devices(self)
        set_nccl_variables(self)
        super().setup_environment()

    @override
    def _setup_distributed(self) -> None:
        join_restarted(self)
        super()._setup_distributed()

    @override
    def _shard_size(self) -> int:
        self._control.compare({"hierarchy": str(self.hierarchy)})  # ranks make the same groups
        return shard_size(discover(self.hierarchy, self._control), self.world_size)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_callbacks(trainer)
            self._path = self._steps = self._inside = None
        if self.world_size > 1:
            self._uneven.attach(trainer, self._control, self._shards_control)
        self._reshard()
        module = self.lightning_module
        assert module is not None
        self._control.compare(sharded_fingerprint(self, module))
        before = None if sharded_modules(module) else OldReferences(module)
        super().setup(trainer)
        self._shards = ShardGroups(module)
        check_groups(module, self._shards, self.shard_mesh, self._keeps_residuals)
        check_inside(self._shards, self.shard_gather, self.shard_scatter)
        begin_alike(module, self.replica_mesh.get_group())
        if not fitting:  # evaluation computes with what training does
            self._inside = InsideNode(self._shards, self.shard_mesh.get_group(), self.root_device, self.shard_gather)
            return
        check_optimizers(self)
        check_references(module, self.optimizers)
        if before is not None:
            before.warn()
        if self._inside_step:
            self._toggles = Toggles(module, self._shards.parameters.values())
        if self.replicas > 1:
            warn_of_mixed_devices(self._control.all_gather(device_name(self.root_device)))
        self._make_path(module, self._shards)
        rank_zero_info(self.explain())

    @override
    def _shard(self) -> None:
        module = self.lightning_module
        assert module is not None
        shard_unless_sharded(module, self.shard_mesh, self.wrap, self.precision_plugin.precision)

    def _make_path(self, module: "pl.LightningModule", shards: ShardGroups) -> None:
        """Let the gradients of each group of FSDP2 take our path, where there is one to take."""
        if self.replicas == 1 and self.shard_scatter is None:
            self._inside = InsideNode(shards, self.shard_mesh.get_group(), self.root_device, self.shard_gather)
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._steps = AppliedSteps(scaler) if scaler is not None and scaler.is_enabled() else None
        shadow = self._steps is not None or self.nonfinite in ("skip", "propagate") or not module.automatic_optimization
        shards.reduce_unused()
        group, inside = self.shard_mesh.get_group(), (self.shard_gather, self.shard_scatter)
        self._path = ShardedPath(
            shards,
            self.compression if self.replicas > 1 else Uncompressed(),
            self.replica_mesh.get_group(),
            self.shard_mesh.get_local_rank(),
            group,
            InsideNode(shards, group, self.root_device, *inside, shadow=shadow),
            device=self.root_device,
            start_step=self.start_step if self.replicas > 1 else 0,
            shadow=shadow,
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._uneven.check_loader(dataloader)
        return super().process_dataloader(dataloader)

    # ---- a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients wait on this rank, reduced over its node, until the last batch of a window."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; where it synchronises, gradients take their path during it."""
        assert self.lightning_module is not None
        assert self._shards is not None
        accumulated = [g for p in self._shards.parameters.values() if (g := p.grad) is not None]
        closure_loss = self._short_window.weighted(closure_loss, self.lightning_module, accumulated)
        by_hand = self._inside_step
        if self._toggles is not None:
            self._toggles.follow_step()
        if by_hand:
            announce_backward(self.lightning_module, closure_loss)
        loss = self._exchanging_backward(closure_loss, optimizer, *args, **kwargs)
        if by_hand:
            gather_again(self.lightning_module)
        return loss

    def _exchanging_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        path = self._path
        if path is None:
            return super().backward(loss, optimizer, *args, **kwargs)
        path.begin_backward(self._deferred, lambda: None if self._steps is None else self._steps.loss_scale)
        loss = super().backward(loss, optimizer, *args, **kwargs)
        path.finish_backward()
        checks = not path.deferred and self._steps is None and self.nonfinite == "error"
        if checks and path.somewhere_nonfinite(self._control):
            raise_named(path, self._control)
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer, and tell the gradient path whether the step was applied."""
        output = self._told_step(optimizer, closure, model, **kwargs)
        if self._inside_step:
            assert self.lightning_module is not None
            gather_again(self.lightning_module)
        return output

    def _told_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        path = self._path
        if path is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        names = None if len(self.optimizers) == 1 else path.names_of(optimizer)
        why_skip = partial(self._why_skip, path) if self._steps is None and self.nonfinite == "skip" else None
        step = partial(super().optimizer_step, model=model, **kwargs)
        return told_step(step, optimizer, closure, path, names, scaled=self._steps, why_skip=why_skip)

    def _why_skip(self, path: ShardedPath) -> str:
        """Return why a step is skipped; empty where it is not."""
        bad = path.somewhere_nonfinite(self._control)
        return "A gradient is not finite: this optimizer step is skipped on all ranks." if bad else ""

    @property
    def _inside_step(self) -> bool:
        """Whether backward and optimizer run inside a step that FSDP2 takes for a forward."""
        module = self.lightning_module
        assert module is not None
        return not module.automatic_optimization and sharded_by_us(module)

    # ---- what happened --------------------------------------------------------------------------------------------

    def comm_stats(self) -> CommStats:
        """Return what this rank sent since the fit began, inside its node and between replicas. Not a collective."""
        path = self._path
        stats = CommStats(method="none", world_size=self.world_size) if path is None else path.stats()
        inside = self._inside if path is None else path.inside
        return stats if inside is None else inside.added_to(stats)

    def gather_comm_stats(self) -> list[CommStats]:
        """Return every rank's :meth:`comm_stats`, waiting told from transfer. A collective: call it on all ranks."""
        if self._path is not None:
            self._path.recorder.compare_waiting(self._replicas_control.all_gather)
        return self._control.all_gather(self.comm_stats())

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_uncalled(exception)

    def explain(self) -> str:
        """Return what is in force, and why, in one line."""
        return explain_sharded(self)

    @override
    def __getstate__(self) -> dict[str, Any]:
        runtime = ("_path", "_shards", "_steps", "_inside", "_toggles")
        return super().__getstate__() | dict.fromkeys(runtime)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(compression={self.compression!r}){import_hint()}"

    @override
    def teardown(self) -> None:
        self._uneven.detach()
        if self._path is not None:
            self._path.detach()
            self._path.close()
        if self._inside is not None:
            self._inside.detach()
        if self._steps is not None:
            self._steps.close()
        if self._toggles is not None:
            self._toggles.detach()
            self._toggles = None
        super().teardown()
