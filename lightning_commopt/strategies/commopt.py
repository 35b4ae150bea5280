"""The data-parallel strategy."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.compression import Compression, Uncompressed, method_named
from lightning_commopt.failure import FailTogetherDDP
from lightning_commopt.measure import CommStats, ReducerLog
from lightning_commopt.routes import GradientPath, Hierarchy, PinnedDDP
from lightning_commopt.strategies.applied_steps import AppliedSteps
from lightning_commopt.strategies.auto import Auto, policy_of
from lightning_commopt.strategies.ddp_arguments import chosen_ddp_arguments
from lightning_commopt.strategies.elastic import join_restarted
from lightning_commopt.strategies.explain import explain
from lightning_commopt.strategies.groups import Groups, make_groups
from lightning_commopt.strategies.nccl import NcclOptions, nccl_variables, set_nccl_variables
from lightning_commopt.strategies.nonfinite import Nonfinite, raise_together
from lightning_commopt.strategies.other_lightning import import_hint
from lightning_commopt.strategies.preflight import (
    check_devices,
    check_model,
    check_optimizers,
    check_options,
    check_trainable,
    device_name,
    fingerprint,
    warn_of_mixed_devices,
)
from lightning_commopt.strategies.residual_checkpoint import ResidualCheckpoint, ResidualPolicy
from lightning_commopt.strategies.rewrap import Trainable, wrap_again_if_changed
from lightning_commopt.strategies.short_window import ShortWindow
from lightning_commopt.strategies.sigterm import Sigterm
from lightning_commopt.strategies.told_step import told_step
from lightning_commopt.tuning import AutoPolicy
from lightning_commopt.uneven import Uneven, UnevenBatches

__all__ = ["CommOptStrategy"]


class CommOptStrategy(FailTogetherDDP):
    """Distributed data parallel with compressed gradient exchange.

    Takes every argument of :class:`~lightning.pytorch.strategies.DDPStrategy`, and options for what goes on the wire.
    ``trainer.strategy.comm_stats()`` tells what was sent and how long it took, ``trainer.strategy.explain()`` what is
    in force and why.

    Args:
        compression: A method by word (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"onebit"``,
            ``"topk"``, ``"powersgd"``) or with its options (``Int8(block=128)``). ``"auto"``, or ``AutoPolicy(...)``
            with options of it: measure a few dense steps, the links and the codecs, take the mildest method that hides
            the communication (none, bf16, int8, int4), check its gain and its error, and look again when the bandwidth
            moves.
        hierarchy: ``"auto"``: where several equal nodes have several ranks each, gradients are reduced in full
            precision inside nodes and travel encoded between them. False: flat. A number: that many consecutive ranks
            make a node.
        start_step: Optimizer steps to be applied with dense gradients before the method begins. None: the method's own
            default. 0: at once.
        nonfinite: What to do about a gradient that is not finite when no ``GradScaler`` handles it: ``"error"`` ends
            all ranks with the parameter's name (default of methods with error feedback), ``"skip"`` skips the optimizer
            step on all ranks, ``"propagate"`` lets it through as DDP does (default of the others).
        residuals: What of the residuals goes into a checkpoint: ``"per_rank"`` each rank's own (exact resume; default
            up to 8 ranks), ``"mean"`` one mean for all (nothing is lost, but a resumed run is not bitwise the same;
            default above), ``"drop"``.
        true_mean: Under gradient accumulation, divide the last window of an epoch by its real length when it is short.
            Lightning divides by the nominal one; without this option that is reported once, with its factor.
        uneven: What to do when ranks have different numbers of training batches: ``"error"`` ends all ranks with the
            numbers, ``"trim"`` lets every rank stop after the shortest, ``"join"`` lets a rank that has ended repeat
            its last batch with weight 0, so that gradients are means over all other batches (batch norms and metrics of
            training see the repeats). Where loaders have no length, ranks tell each other before each batch whether
            another one follows: one small all-reduce.
        stall_timeout: Seconds (or a `timedelta`) that a rank which lives but does not go on may hold up training; then
            all ranks end, and the message has its stack. Set-up, compilation, validation and checkpoints do not count.
            None: the `timeout` of the process groups. A rank that is dead or stopped is found in seconds anyway.
        nccl: Environment variables of NCCL by name, such as ``{"algo": "Ring", "debug": "INFO"}`` for ``NCCL_ALGO`` and
            ``NCCL_DEBUG``. They are checked, set in every process before its process group is made, win over the
            environment, and stay set. CUDA only.
        **kwargs: As for :class:`~lightning.pytorch.strategies.DDPStrategy`, including those of
            :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ValueError: An option is out of its bounds, or cannot be honoured; the message says what to do instead.

    """

    _joins: ClassVar[bool] = True
    """Whether `uneven="join"` is possible."""

    def __init__(
        self,
        compression: Compression | AutoPolicy | str = "auto",
        *,
        hierarchy: Hierarchy = "auto",
        start_step: int | None = None,
        nonfinite: Nonfinite | None = None,
        residuals: ResidualPolicy | None = None,
        true_mean: bool = False,
        uneven: Uneven = "error",
        stall_timeout: float | timedelta | None = None,
        nccl: NcclOptions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._ddp_kwargs = chosen_ddp_arguments(self._ddp_kwargs, type(self))
        self.nccl = nccl_variables(nccl)
        self._policy = policy_of(compression)
        self._is_auto = self._policy is not None
        self.compression = (
            Uncompressed()
            if isinstance(compression, AutoPolicy) or self._is_auto
            else method_named(compression, ["auto"])
        )
        self.start_step = self.compression.default_start_step if start_step is None else start_step
        self.hierarchy: Hierarchy = hierarchy
        self.nonfinite: Nonfinite = nonfinite or ("error" if self.compression.error_feedback else "propagate")
        self.true_mean = true_mean
        self.stall_timeout = stall_timeout
        check_options(self, start_step, nonfinite, residuals)
        self._short_window = ShortWindow(true_mean)
        self._uneven = UnevenBatches(uneven, joins=self._joins)
        self._checkpoint = ResidualCheckpoint(residuals, self._signature())
        self._auto = None if self._policy is None else Auto(self, self._policy, propagates=nonfinite == "propagate")
        self._wrapped: Trainable | None = None  # the parameters that DDP exchanges
        self._path: GradientPath | None = None
        self._steps: AppliedSteps | None = None
        self._groups: tuple[object, Groups] | None = None
        self._log: ReducerLog | None = None
        self._sigterm: Sigterm | None = None

    # ---- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._auto is not None:
            self._auto.begin()
        if fitting:  # after a fit, validation or a test leaves its state to be saved and its statistics to be read
            self._path = self._steps = self._log = None
        if self.world_size > 1:
            self._uneven.attach(trainer, self._control)
        super().setup(trainer)
        self._sigterm = Sigterm(trainer, self) if self.world_size > 1 else None
        if fitting:
            check_optimizers(self)
            if self.world_size > 1:
                warn_of_mixed_devices(self._control.all_gather(device_name(self.root_device)))
            if self._auto is not None:
                self._auto.start()
            rank_zero_info(self.explain())

    @override
    def setup_environment(self) -> None:
        check_devices(self)
        set_nccl_variables(self)
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        join_restarted(self)
        super().setup_distributed()

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        """Wrap the module; a method that compresses gets buckets that never change."""
        if self.world_size > 1:
            self._control.compare(fingerprint(self, model))
            self._uneven.check_model(model)
        self._wrapped = Trainable(model)
        if not self._exchanges:
            return super()._setup_model(model)
        check_model(self, model)
        return PinnedDDP(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def _register_ddp_hooks(self) -> None:
        """Register the gradient path, on CPU too (the base class would drop a hook there without a word)."""
        assert isinstance(self.model, DistributedDataParallel)
        if not self._exchanges:
            if self._log is not None:
                self._log.follow(self.model)
            elif self.world_size > 1:
                self._log = ReducerLog(self.model)
            self._watch_reducer()
            return
        assert self.lightning_module is not None
        parameters = {
            name: p
            for name, p in self.lightning_module.named_parameters()
            if p.requires_grad and name not in self.model.parameters_to_ignore
        }
        if self._path is not None:
            self._path.follow(parameters)
            self.model.register_comm_hook(None, self._path.hook)
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._steps = AppliedSteps(scaler) if scaler is not None and scaler.is_enabled() else None
        may_be_unused = self.model.find_unused_parameters
        may_skip = self._steps is not None or self.nonfinite in ("skip", "propagate")
        groups = self._process_groups()
        self._path = GradientPath(
            parameters,
            self.compression,
            groups.gradients,
            self.root_device,
            node_group=groups.node,
            start_step=self.start_step,
            shadow=may_skip or may_be_unused or not self.lightning_module.automatic_optimization,
            track_usage=may_be_unused,
        )
        self.model.register_comm_hook(None, self._path.hook)

    def _signature(self) -> str:
        """What residuals in a checkpoint belong to."""
        return f"{self.compression!r}, hierarchy {self.hierarchy}, DDP {sorted(self._ddp_kwargs.items())}"

    @property
    def _exchanges(self) -> bool:
        """Whether gradients take our path: there is somebody to talk to, and something to compress."""
        return self.world_size > 1 and not isinstance(self.compression, Uncompressed)

    def _process_groups(self) -> Groups:
        """Return the groups for gradients, made once for each default process group, on ranks with the same options."""
        world = dist.group.WORLD
        if self._groups is None or self._groups[0] is not world:
            shards = self._is_auto or (self._exchanges and not self.compression.summable)
            hierarchy = self.hierarchy if shards else False
            self._groups = (world, make_groups(self._control, self.root_device, hierarchy, self._timeout))
        return self._groups[1]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._uneven.check_loader(dataloader)
        return super().process_dataloader(dataloader)

    # ---- a step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        wrap_again_if_changed(self, batch_idx)
        if self._auto is not None:
            self._auto.before_batch(batch_idx)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; where it synchronises, gradients take their path during it."""
        assert self.lightning_module is not None
        closure_loss = self._short_window.weighted(closure_loss, self.lightning_module)
        synchronises = isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync
        if synchronises and self.world_size > 1:
            check_trainable(self.lightning_module, self._wrapped.identities if self._wrapped is not None else ())
        if self._path is not None and synchronises:
            self._path.begin_round(self._loss_scale)
        auto = self._auto if synchronises else None
        if auto is not None:
            auto.backward_begins()
        with self._uneven.weighted(closure_loss, self.lightning_module) as weighted_loss:
            loss = super().backward(weighted_loss, optimizer, *args, **kwargs)
        if self._log is not None and synchronises:
            self._log.note_round()
        if self._path is None or not synchronises:
            if auto is not None:
                auto.backward_ended()
            return loss
        self._path.finish_round()
        if auto is not None:
            auto.backward_ended()
        if self._sigterm is not None:
            self._sigterm.round_done()
        if self._steps is None and self.nonfinite == "error":
            self._raise_if_nonfinite(self._path)
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
        path = self._path
        if path is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        names = self._parameters_of(optimizer)
        why_skip = partial(self._why_skip, path, names) if self._steps is None and self.nonfinite == "skip" else None
        step = partial(super().optimizer_step, model=model, **kwargs)
        return told_step(step, optimizer, closure, path, names, scaled=self._steps, why_skip=why_skip)

    def _why_skip(self, path: GradientPath, names: frozenset[str] | None) -> str:
        """Return why a step of an optimizer's parameters is skipped; empty where it is not."""
        bad = [name for name in self._nonfinite_names(path) if names is None or name in names]
        return f"The gradient of `{bad[0]}` is not finite: this optimizer step is skipped on all ranks." if bad else ""

    def _raise_if_nonfinite(self, path: GradientPath) -> None:
        """End all ranks when the last round had a gradient that was not finite."""
        raise_together(path, self._control)

    def _nonfinite_names(self, path: GradientPath) -> list[str]:
        """Names of the parameters whose gradient was not finite in the last round, the same on all ranks."""
        return path.nonfinite_parameters()

    @property
    def _carries_sigterm(self) -> GradientPath | None:
        """The exchange that takes a request to end to all ranks."""
        return self._path

    def _loss_scale(self) -> Tensor | None:
        """The factor on the gradients of the running backward."""
        return None if self._steps is None else self._steps.loss_scale

    def _parameters_of(self, optimizer: Optimizer) -> frozenset[str] | None:
        """Names of an optimizer's parameters, None when it is the only one."""
        if len(self.optimizers) == 1:
            return None
        assert self._path is not None
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return frozenset(name for name, p in self._path.parameters.items() if id(p) in own)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: "str | Path", storage_options: Any = None) -> None:
        """Add the residuals to a checkpoint that can be resumed from; plain Lightning ignores them."""
        written = None
        assert self.lightning_module is not None
        together = self._sigterm is not None and self._sigterm.agreed
        if self.lightning_module.trainer.interrupted and not together:
            self._checkpoint.leave_out(checkpoint, self._path)
        elif self._path is not None and "optimizer_states" in checkpoint:
            written = self._checkpoint.add(checkpoint, str(filepath), self._path, self._control, self.checkpoint_io)
        if self._auto is not None:
            self._auto.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if written is not None and self.is_global_zero:
            self._checkpoint.sweep(*written)

    @override
    def load_checkpoint(self, checkpoint_path: "str | Path", weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpoint.remember(str(checkpoint_path), checkpoint)
        if self._auto is not None:
            self._auto.remember(checkpoint)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._path is not None:
            self._checkpoint.restore(self._path, self._control, self.checkpoint_io)
        else:
            self._checkpoint.forget("no method is active" if self._auto is None else self._auto.why_dense())

    @override
    def remove_checkpoint(self, filepath: "str | Path") -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self._checkpoint.remove(str(filepath))

    # ---- what happened --------------------------------------------------------------------------------------------

    def comm_stats(self) -> CommStats:
        """Return what this rank's exchange of gradients did since the fit began. Not a collective."""
        source = self._path or self._log
        stats = CommStats(method="none", world_size=self.world_size) if source is None else source.stats()
        return stats if self._auto is None else self._auto.with_retired(stats)

    @property
    def decisions(self) -> tuple[str, ...]:
        """What ``compression="auto"`` decided so far, and why, line by line."""
        decided = () if self._auto is None else self._auto.decisions()
        return tuple(f"after {decision.step} exchanges: {decision.reason}" for decision in decided)

    def gather_comm_stats(self) -> list[CommStats]:
        """Return every rank's :meth:`comm_stats`, waiting told from transfer. A collective: call it on all ranks."""
        if self.world_size == 1:
            return [self.comm_stats()]
        source = self._log if self._path is None else self._path.recorder
        if source is not None:
            source.compare_waiting(self._control.all_gather)
        return self._control.all_gather(self.comm_stats())

    def explain(self) -> str:
        """Return what is in force, and why, in one line."""
        return explain(self)

    @override
    def __getstate__(self) -> dict[str, Any]:
        runtime = dict.fromkeys(("_path", "_steps", "_log", "_groups", "_sigterm"))
        return super().__getstate__() | runtime  # threads and process groups stay where they are

    def __repr__(self) -> str:
        return f"{type(self).__name__}(compression={self.compression!r}){import_hint()}"

    @override
    def teardown(self) -> None:
        self._uneven.detach()
        if self._path is not None:
            self._path.close()
        if self._log is not None:
            self._log.close()
        if self._steps is not None:
            self._steps.close()
        if self._sigterm is not None:
            self._sigterm.close()
        if self._auto is not None:
            self._auto.close()
        super().teardown()
