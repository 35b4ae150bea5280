"""``compression="auto"`` under Lightning: drives the tuner, and wraps the module again when it changes its mind."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_commopt.measure import CommStats
from lightning_commopt.routes import Topology
from lightning_commopt.strategies.preflight import check_model, refuse_ddp_options
from lightning_commopt.strategies.switch import Switch
from lightning_commopt.tuning import (
    AutoPolicy,
    Choice,
    Decision,
    Observed,
    Tuner,
    Ways,
    largest_state_bytes,
    memory,
    memory_advice,
)

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["KEY", "Auto", "policy_of"]

KEY = "lightning_commopt_auto"
"""Where a checkpoint keeps the decisions."""


def policy_of(compression: object) -> AutoPolicy | None:
    """Return the policy that ``compression`` stands for, None where it names a method."""
    if isinstance(compression, AutoPolicy):
        return compression
    return AutoPolicy() if compression == "auto" else None


class Auto:
    """What a fit does about ``compression="auto"``, from set-up to teardown.

    Args:
        strategy: The strategy.
        policy: What the user wants.
        propagates: Whether the user wants gradients that are not finite to go through, whatever is in force.

    """

    def __init__(self, strategy: "CommOptStrategy", policy: AutoPolicy, *, propagates: bool = False) -> None:
        self.policy = policy
        self.tuner: Tuner | None = None
        self.blocked = ""
        """Why nothing can be chosen; empty where something can."""
        self._strategy = strategy
        self._switch = Switch(strategy, policy.cosine_every, propagates=propagates)
        self._saved: Mapping[str, Any] | None = None
        self._pending: Choice | None = None  # waits for a dense exchange that clears residuals

    # ---- set-up ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a fit: with what a checkpoint says is in force, else with DDP's own reducer. Before wrapping."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        self.tuner, self._pending = None, None
        self.blocked = self._why_blocked(module) if strategy.world_size > 1 else ""
        if self._saved and (self.blocked or strategy.world_size == 1):
            if self.blocked:
                rank_zero_warn(f"What `auto` had decided in the checkpoint is not taken: {self.blocked}")
            self._saved = None
        if self._saved and self._saved["in_force"]["method"] not in ("none", *self.policy.methods):
            rank_zero_warn(
                f"The checkpoint was written under `{self._saved['in_force']['method']}`, which may not be taken now."
            )
            self._saved = None
        self._switch.begin(Choice(**self._saved["in_force"]) if self._saved else Choice())

    def start(self) -> None:
        """Measure the links. After wrapping; a collective."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        groups = strategy._process_groups() if strategy.world_size > 1 and not self.blocked else None
        policy = self.policy if groups is None or groups.node is None else self.policy.without_summable()
        residual_bytes = 0 if groups is None else self._residual_bytes(module, policy, groups.topology)
        device_memory = memory.device_bytes(strategy.root_device)
        if advice := memory_advice(module, strategy.optimizers, device_memory, strategy.world_size, residual_bytes):
            rank_zero_warn(advice)
        if groups is None:
            return
        world = dist.group.WORLD
        assert world is not None
        self._switch.equip_path()
        fixed = self._switch.own_arguments.get("bucket_cap_mb", 25.0 if _is_compiled(module) else None)
        self.tuner = Tuner(
            policy,
            strategy._control,
            Ways(world, groups.gradients, groups.node),
            strategy.root_device,
            _trainable(module),
            self._observe,
            bucket_mb=fixed,
            free_bytes=lambda: memory.free_bytes(strategy.root_device),
        )
        if self._saved:
            self.tuner.load_state_dict(
                self._saved["tuner"] | {"same_world": self._saved["world"] == strategy.world_size}
            )
            chosen = self.tuner.state.choice
            self._pending = chosen if chosen != self._switch.choice else None
            self._saved = None
        if strategy._log is not None and strategy.root_device.type == "cpu":
            strategy._log.sample_often()
        self.tuner.start()

    def _residual_bytes(self, module: pl.LightningModule, policy: AutoPolicy, topology: Topology) -> int:
        """Return the state of the method that keeps most, of those that may be taken."""
        strategy = self._strategy
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        may_skip = (scaler is not None and scaler.is_enabled()) or not module.automatic_optimization
        return largest_state_bytes(
            [p.shape for p in _trainable(module).values()],
            policy.methods,
            topology.nodes if topology.hierarchical else strategy.world_size,
            topology.ranks_per_node if topology.hierarchical else 1,
            shadow=may_skip or bool(self._switch.own_arguments.get("find_unused_parameters")),
        )

    def follow(self, module: nn.Module) -> None:
        """Go on with the parameters that are trainable now."""
        if self.tuner is not None:
            self.tuner.follow(_trainable(module))

    def _why_blocked(self, module: nn.Module) -> str:
        try:
            refuse_ddp_options(self._strategy, "auto")
            check_model(self._strategy, module)
        except ValueError as error:
            return str(error)
        backend = self._strategy._process_group_backend
        expected = "nccl" if self._strategy.root_device.type == "cuda" else "gloo"
        return "" if backend in (None, expected) else f"compressed payloads travel by {expected}, not by {backend}"

    # ---- a step ---------------------------------------------------------------------------------------------------

    def before_batch(self, batch_idx: int) -> None:
        """Change what is in force where that is due, between two windows of accumulation. On all ranks alike."""
        module = self._strategy.lightning_module
        if self.tuner is None or module is None:
            return
        if module.automatic_optimization and batch_idx % module.trainer.accumulate_grad_batches:
            return
        path = self._strategy._path
        if self._pending is not None:
            if path is None or not path.dense:
                pending, self._pending = self._pending, None
                self._switch.put_in_force(pending)
            return
        decided = len(self.tuner.state.decisions)
        choice = self.tuner.before_step()
        if len(self.tuner.state.decisions) > decided or self.tuner.verified_now:
            rank_zero_info(f"commopt auto, after {self.tuner.rounds} exchanges: {self.tuner.words()}.")
        if choice is None:
            return
        if path is not None and not self._switch.keeps_residuals(choice):
            path.flush(len(self._strategy.optimizers))
            self._pending = choice
        else:
            self._switch.put_in_force(choice)

    def backward_begins(self) -> None:
        """A synchronising backward begins."""
        if self.tuner is not None:
            self.tuner.backward_begins()

    def backward_ended(self) -> None:
        """All gradients are exchanged."""
        if self.tuner is not None:
            self.tuner.backward_ended()

    # ---- what happened --------------------------------------------------------------------------------------------

    def with_retired(self, stats: CommStats) -> CommStats:
        """Add what was exchanged before the module was wrapped again."""
        return self._switch.with_retired(stats)

    def _observe(self) -> Observed:
        """Return what is known of the exchange in force. A collective."""
        mine = self._strategy.gather_comm_stats()[self._strategy.global_rank]
        path = self._strategy._path
        cosine = None if path is None else path.mean_check.cosine
        return Observed(mine, None if cosine is None else float(cosine))

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put the decisions into a checkpoint."""
        if self.tuner is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = {
                "version": 1,
                "world": self._strategy.world_size,
                "in_force": asdict(self._switch.choice),
                "tuner": self.tuner.state_dict(),
            }

    def remember(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the decisions of a checkpoint that a fit resumes from."""
        module = self._strategy.lightning_module
        fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        self._saved = checkpoint.get(KEY) if fitting else None

    def decisions(self) -> tuple[Decision, ...]:
        """Return what was decided so far, also after a fit."""
        return () if self.tuner is None else self.tuner.state.decisions

    def words(self) -> str:
        """Return what was decided and why, for the line that explains."""
        if self.blocked:
            return f"auto cannot choose a method: {self.blocked} "
        return "" if self.tuner is None else f"auto: {self.tuner.words()}; "

    def why_dense(self) -> str:
        """Return why a fit begins without a method, where it does."""
        if self.blocked:
            return f"auto cannot choose a method: {self.blocked}"
        return (
            "`auto` begins with dense steps, which keep none; to keep them, go on with the method of the checkpoint "
            "(`compression=...`)"
        )

    def close(self) -> None:
        """Let go of the module."""
        if self.tuner is not None:
            self.tuner.close()


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled, wholly or in part: smaller buckets would cut its graphs."""
    return (
        any(m._compiled_call_impl is not None for m in module.modules())
        or hasattr(module, "_orig_mod")
        or (getattr(module, "_compiler_ctx", None) is not None)
    )
