"""The strategy for models that DeepSpeed shards."""

import copy
import importlib.util
import inspect
import json
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.failure import FailTogether
from lightning_commopt.measure import CommStats
from lightning_commopt.strategies.backends import check_backend
from lightning_commopt.strategies.other_lightning import import_hint
from lightning_commopt.strategies.preflight import check_timeout
from lightning_commopt.uneven import UnevenBatches
from lightning_commopt.zero.any_device import AnyDeviceDeepSpeed
from lightning_commopt.zero.backend import GradientBackend
from lightning_commopt.zero.checks import (
    check_config,
    check_device,
    check_method,
    check_module,
    check_options,
    check_precision,
    check_version,
)
from lightning_commopt.zero.config import TrainerValues, add_zero_plus_plus, merged, take_trainer_values
from lightning_commopt.zero.exchange import ZeroExchange
from lightning_commopt.zero.hooked import note_hooks, remove_hooks
from lightning_commopt.zero.residual_files import load_residuals, save_residuals

__all__ = ["CommOptDeepSpeedStrategy"]


class CommOptDeepSpeedStrategy(FailTogether, AnyDeviceDeepSpeed):
    """DeepSpeed ZeRO with compressed gradient exchange, on CUDA devices and on the CPU.

    Gradients are compressed where DeepSpeed hands them to its communication backend. That place is not public: methods
    other than ``"none"`` and ``"zero++"`` are experimental, need DeepSpeed 0.19, and end the run when they are not
    reached. Parameters that ZeRO gathers travel as DeepSpeed sends them.

    The Trainer owns accumulation, clipping, precision and batch size: a DeepSpeed configuration that says otherwise is
    refused. The merged configuration is shown when a fit begins.

    Args:
        stage: 0: replicas. 1: optimizer states are sharded. 2: gradients too. 3: parameters too. None: as in
            ``config``, else 2.
        compression: ``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"onebit"``, one of these with options
            (``Int8(block=128)``), or ``"zero++"``: DeepSpeed's own quantised weights and gradients, and
            between several nodes its second copy of the weights in each (hpZ; stage 3, CUDA).
        start_step: Optimizer steps with dense gradients before the method begins. None: the method's own default.
        residuals: Whether what a round drops is added to the next one. That takes 4 bytes a parameter on every rank,
            which ZeRO does not shard. None: for methods of fewer than 8 bits, which need it.
        uneven: ``"error"`` or ``"trim"``, as in :class:`~lightning_commopt.CommOptStrategy`. At stage 3 for evaluation
            as well: a forward gathers parameters, so that ranks run as many of them.
        stall_timeout: As in :class:`~lightning_commopt.CommOptStrategy`.
        config: A DeepSpeed configuration, or the path of one. It is laid over the one that the other arguments make.
        **kwargs: As for :class:`~lightning.pytorch.strategies.DeepSpeedStrategy`.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        ValueError: DeepSpeed would ignore an option, or crash on it; the message says what to do instead.

    """

    def __init__(
        self,
        stage: int | None = None,
        compression: Compression | str = "none",
        *,
        start_step: int | None = None,
        residuals: bool | None = None,
        uneven: Literal["error", "trim"] = "error",
        stall_timeout: float | timedelta | None = None,
        config: "str | Path | dict[str, Any] | None" = None,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                "`CommOptDeepSpeedStrategy` needs DeepSpeed: `pip install 'lightning-commopt[deepspeed]'`."
            )
        self.compression, self.zero_plus_plus = check_method(compression)
        check_version(self.compression, metadata.version("deepspeed"))
        check_options(self.compression, start_step, residuals)
        if not kwargs.get("zero_optimization", True):
            raise ValueError("`zero_optimization=False`: set `stage=0`.")
        self._user_config: dict[str, Any] = {}
        super().__init__(stage=2 if stage is None else stage, config=config, **kwargs)
        assert self.config is not None
        self.config = merged(self.config, self._user_config, _given(stage, kwargs))
        zero = self.config["zero_optimization"]
        if zero.get("offload_optimizer") and "optimizer" not in self.config:
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # its own is compiled for minutes at start
        check_config(self.config, self.compression, self.zero_plus_plus)
        self.start_step = self.compression.default_start_step if start_step is None else start_step
        bits = getattr(self.compression, "bits", 32)
        self.residuals = (bits < 8 if residuals is None else residuals) and self.compression.error_feedback
        check_timeout(self._timeout)
        self.stall_timeout = stall_timeout
        self._uneven = UnevenBatches(uneven, joins=False)
        self._exchange: ZeroExchange | None = None
        self._backend: GradientBackend | None = None

    @override
    def _load_config(self, config: Any) -> None:
        """Keep the user's configuration apart, so that Lightning makes one of its arguments too."""
        self._user_config = super()._load_config(config) or {}

    @property
    def stage(self) -> int:
        """The ZeRO stage in force."""
        assert self.config is not None
        return int(self.config["zero_optimization"]["stage"])

    # ---- set-up ---------------------------------------------------------------------------------------------------

    @override
    def before_launch(self, trainer: "pl.Trainer") -> None:
        """Refuse what DeepSpeed would ignore or crash on.

        Raises:
            ValueError: Saying what to do instead.

        """
        assert self.config is not None
        precision = str(self.precision_plugin.precision)
        check_backend(self._process_group_backend, self.root_device.type)
        check_device(self.config, self.root_device.type, self.zero_plus_plus)
        check_precision(precision, self.root_device.type, self.compression)
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError("`gradient_clip_algorithm='value'`: DeepSpeed clips by norm only. Choose 'norm'.")
        if not self._config_initialized:
            take_trainer_values(copy.deepcopy(self.config), self._values_of(trainer))

    def _values_of(self, trainer: "pl.Trainer") -> TrainerValues:
        return TrainerValues(
            accumulation=trainer.accumulate_grad_batches,
            clipping=trainer.gradient_clip_val or 0.0,
            precision=str(self.precision_plugin.precision),
            batch_size=self._loader_batch_size(trainer),
            world=self.world_size,
        )

    @override
    def setup_environment(self) -> None:
        assert self.config is not None
        check_device(self.config, self.root_device.type, self.zero_plus_plus)
        if self.zero_plus_plus:
            add_zero_plus_plus(self.config["zero_optimization"], self.num_processes, self.num_nodes)
        hpz = self.config["zero_optimization"].get("zero_hpz_partition_size", 1)
        if hpz > 1 and self.world_size % hpz:
            raise ValueError(
                f"`zero_hpz_partition_size={hpz}` must divide the number of ranks, which is {self.world_size}."
            )
        if self.zero_plus_plus and self.num_nodes == 1:
            rank_zero_warn(
                "`compression='zero++'` on one node: DeepSpeed quantises weights there, gradients between nodes only, "
                "and hpZ would keep a second copy of all weights for nothing."
            )
        super().setup_environment()

    @override
    def _format_config(self) -> None:
        assert self.config is not None
        if self.lightning_module is not None:
            take_trainer_values(self.config, self._values_of(self.lightning_module.trainer))
        super()._format_config()

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.before_launch(trainer)  # some launchers are not ours
        self._remove_backend()
        assert self.lightning_module is not None
        if fitting and not isinstance(self.compression, Uncompressed):
            check_module(self.lightning_module, self.compression)
        remove_hooks(self.lightning_module)
        if self.world_size > 1:
            self._uneven.attach(trainer, self._control, self._control if self.stage == 3 else None)
        super().setup(trainer)
        note_hooks(self.lightning_module, self.deepspeed_engine)
        if not fitting:
            return
        self._exchange = None
        if self.world_size > 1 and not self.zero_plus_plus:
            self._exchange = ZeroExchange(self.compression, self.root_device, residuals=self.residuals)
            self._backend = GradientBackend(self._exchange, self.deepspeed_engine, self._is_dense)
        rank_zero_info(self.explain())

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._uneven.check_loader(dataloader)
        return super().process_dataloader(dataloader)

    def _is_dense(self) -> bool:
        """Whether gradients of the running step travel as DeepSpeed sends them."""
        return isinstance(self.compression, Uncompressed) or self.deepspeed_engine.global_steps < self.start_step

    # ---- a step ---------------------------------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Whether DeepSpeed decides when to step: not at an epoch's last batch, where Lightning steps in any case.

        DeepSpeed's own count would go on over the end of the epoch, and away from ``global_step``.
        """
        module = self.lightning_module
        return module is None or not module.trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Tell DeepSpeed before each forward whether the Trainer will step after it."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            steps = not self.lightning_module.trainer.fit_loop._should_accumulate()
            self.deepspeed_engine.set_gradient_accumulation_boundary(steps)
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; sums of gradients in it take their path."""
        kwargs.setdefault("scale_wrt_gas", False)  # Lightning has divided the loss by the accumulation already
        if self._backend is None or self._exchange is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self._backend.backward():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._exchange.finish_round()
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step, once gradients are known to have come by."""

        def then_check() -> Any:
            loss = closure()
            if self._exchange is not None and self.deepspeed_engine.is_gradient_accumulation_boundary():
                self._exchange.finish_step()
            return loss

        return super().optimizer_step(optimizer, then_check, model, **kwargs)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def _signature(self) -> str:
        """What residuals in a checkpoint belong to."""
        return f"{self.compression!r} at stage {self.stage} on {self.world_size} ranks"

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: "str | Path", storage_options: Any = None) -> None:
        """Write DeepSpeed's folder, and the residuals of each rank into it."""
        filepath = self.broadcast(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._exchange is not None:
            save_residuals(filepath, self.global_rank, self._signature, self._exchange)
            self.barrier()

    @override
    def load_checkpoint(self, checkpoint_path: "str | Path", weights_only: bool | None = None) -> dict[str, Any]:
        """Read DeepSpeed's folder, and in a fit the residuals of this rank.

        Raises:
            ValueError: At stage 3, outside of a fit, where DeepSpeed cannot.

        """
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if not fitting and self.stage == 3 and not self.load_full_weights:
            raise ValueError(
                f"`ckpt_path={str(checkpoint_path)!r}`: DeepSpeed loads sharded parameters of stage 3 into a fit only. "
                "Make one file of it with `convert_zero_checkpoint_to_fp32_state_dict` of "
                "`lightning.pytorch.utilities.deepspeed`, and load that, here with `load_full_weights=True` or in a "
                "Trainer without DeepSpeed."
            )
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if fitting and self._exchange is not None:
            load_residuals(checkpoint_path, self.global_rank, self._signature, self._exchange)
        return checkpoint

    # ---- what happened --------------------------------------------------------------------------------------------

    def comm_stats(self) -> CommStats:
        """Return what this rank's exchange of gradients did since the fit began. Not a collective."""
        if self._exchange is None:
            return CommStats(method=self.compression.name, world_size=self.world_size)
        return self._exchange.stats(self.world_size)

    def gather_comm_stats(self) -> list[CommStats]:
        """Return every rank's :meth:`comm_stats`. A collective: call it on all ranks."""
        if self.world_size == 1:
            return [self.comm_stats()]
        if self._exchange is not None:
            self._exchange.recorder.compare_waiting(self._control.all_gather)
        return self._control.all_gather(self.comm_stats())

    def explain(self) -> str:
        """Return what is in force in one line, and the merged DeepSpeed config in another."""
        return f"{self._in_force()}\nDeepSpeed config: {json.dumps(self.config, default=str)}"

    def _in_force(self) -> str:
        where = f"DeepSpeed ZeRO stage {self.stage} on {self.world_size} rank{'s' * (self.world_size > 1)}"
        if self.zero_plus_plus:
            return f"commopt: {where}, with its own quantised weights and gradients (ZeRO++)."
        if isinstance(self.compression, Uncompressed):
            return f"commopt: {where}; method `none`: gradients travel as DeepSpeed sends them."
        if self.world_size == 1:
            return f"commopt: {where}; method `{self.compression.name}` is not active: there is nothing to exchange."
        dense = f", after {self.start_step} dense steps" if self.start_step else ", from the first step"
        kept = "without residuals"
        if self.residuals and self.lightning_module is not None:
            numel = sum(
                getattr(p, "ds_numel", p.numel()) for p in self.lightning_module.parameters() if p.requires_grad
            )
            kept = f"with residuals (about {4 * numel / 1e6:.1f} MB a rank)"
        return f"commopt: {where}; method `{self.compression!r}` (experimental) {kept}{dense}."

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | dict.fromkeys(("_exchange", "_backend"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stage={self.stage}, compression={self.compression!r}){import_hint()}"

    def _remove_backend(self) -> None:
        if self._backend is not None:
            self._backend.remove()
        self._backend = None

    @override
    def teardown(self) -> None:
        self._uneven.detach()
        self._remove_backend()
        super().teardown()


def _given(stage: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that say something: a command line passes all others too."""
    known = inspect.signature(DeepSpeedStrategy).parameters
    given = {name: value for name, value in kwargs.items() if value != known[name].default}
    return given if stage is None else {"stage": stage, **given}
