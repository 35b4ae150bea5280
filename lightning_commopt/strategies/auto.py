"""``compression="auto"`` under Lightning: drives the tuner, and wraps the module again when it changes its mind."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compression import Uncompressed, method_named
from lightning_commopt.measure import CommStats
from lightning_commopt.strategies.preflight import check_model, refuse_ddp_options
from lightning_commopt.strategies.rewrap import wrap_again
from lightning_commopt.tuning import AutoPolicy, Choice, Decision, Observed, Tuner, Ways, memory_advice

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
        self._own_arguments = dict(strategy._ddp_kwargs)
        self._propagates = propagates
        self._saved: Mapping[str, Any] | None = None
        self._pending: Choice | None = None  # waits for a dense exchange that clears residuals
        self._retired: CommStats | None = None

    # ---- set-up ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a fit: with what a checkpoint says is in force, else with DDP's own reducer. Before wrapping."""
        self.tuner, self._pending, self._retired = None, None, None
        if self._saved and self._saved["in_force"]["method"] not in ("none", *self.policy.methods):
            rank_zero_warn(
                f"The checkpoint was written under `{self._saved['in_force']['method']}`, which may not be taken now."
            )
            self._saved = None
        choice = Choice(**self._saved["in_force"]) if self._saved else Choice()
        self._put_in_force(choice)

    def start(self) -> None:
        """Measure the links. After wrapping; a collective."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        if advice := memory_advice(
            module, strategy.optimizers, _device_bytes(strategy.root_device), strategy.world_size
        ):
            rank_zero_warn(advice)
        if strategy.world_size == 1:
            return
        self.blocked = self._why_blocked(module)
        if self.blocked:
            return
        groups, world = strategy._process_groups(), dist.group.WORLD
        assert world is not None
        hierarchical = groups.topology.hierarchical
        fixed = self._own_arguments.get("bucket_cap_mb", 25.0 if _is_compiled(module) else None)
        self.tuner = Tuner(
            _without_summable(self.policy) if hierarchical else self.policy,
            strategy._control,
            Ways(world, groups.gradients, groups.node),
            strategy.root_device,
            _trainable(module),
            self._observe,
            bucket_mb=fixed,
            free_bytes=lambda: _free_bytes(strategy.root_device),
        )
        if self._saved:
            self.tuner.load_state_dict(
                self._saved["tuner"] | {"same_world": self._saved["world"] == strategy.world_size}
            )
            chosen = self.tuner.state.choice
            self._pending = chosen if chosen != Choice(**self._saved["in_force"]) else None
            self._saved = None
        if strategy._log is not None and strategy.root_device.type == "cpu":
            strategy._log.sample_often()
        self.tuner.start()

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
                self._switch(pending)
            return
        decided = len(self.tuner.state.decisions)
        choice = self.tuner.before_step()
        if len(self.tuner.state.decisions) > decided or self.tuner.verified_now:
            rank_zero_info(f"commopt auto, after {self.tuner.rounds} exchanges: {self.tuner.words()}.")
        if choice is None:
            return
        if path is not None and not self._keeps_residuals(choice):
            path.flush(len(self._strategy.optimizers))
            self._pending = choice
        else:
            self._switch(choice)

    def backward_begins(self) -> None:
        """A synchronising backward begins."""
        if self.tuner is not None:
            self.tuner.backward_begins()

    def backward_ended(self) -> None:
        """All gradients are exchanged."""
        if self.tuner is not None:
            self.tuner.backward_ended()

    def _keeps_residuals(self, choice: Choice) -> bool:
        """Whether the next method can take over what this one owes: it owes too, for the same parameters."""
        new, old, path = method_named(choice.method), self._strategy.compression, self._strategy._path
        if path is None or path.node is not None or not new.error_feedback:
            return False
        return all(new.travels_exactly(p.shape) == old.travels_exactly(p.shape) for p in path.parameters.values())

    def _switch(self, choice: Choice) -> None:
        """Put a choice in force: in the path that is there, or by wrapping the module again."""
        strategy, path = self._strategy, self._strategy._path
        method = method_named(choice.method)
        if path is not None and not isinstance(method, Uncompressed):
            self._put_in_force(choice)
            path.switch(method)
        else:
            if path is not None:
                self._retire(path.stats())
                path.close()
                strategy._path = None
                if strategy._steps is not None:
                    strategy._steps.close()
                    strategy._steps = None
            elif strategy._log is not None:
                self._retire(strategy._log.stats())
                strategy._log.close()
                strategy._log = None
            if strategy._reached is not None:
                strategy._reached.close()
                strategy._reached = None
            self._put_in_force(choice)
            assert isinstance(strategy.model, DistributedDataParallel)
            assert strategy.lightning_module is not None
            wrap_again(strategy, strategy.lightning_module)
        if strategy._path is not None:
            strategy._path.error_due = True
            strategy._path.mean_check.every = self.policy.cosine_every
            strategy._path.termination.asked = strategy._sigterm is not None and strategy._sigterm.asked
        elif strategy._log is not None and strategy.root_device.type == "cpu":
            strategy._log.sample_often()

    def _put_in_force(self, choice: Choice) -> None:
        """Set the strategy's options to what a choice means."""
        strategy, method = self._strategy, method_named(choice.method)
        strategy.compression = method
        strategy.start_step = 0
        strategy.nonfinite = "error" if method.error_feedback and not self._propagates else "propagate"
        size = (
            {} if choice.bucket_mb is None or isinstance(method, Uncompressed) else {"bucket_cap_mb": choice.bucket_mb}
        )
        strategy._ddp_kwargs = self._own_arguments | size
        strategy._checkpoint.signature = strategy._signature()

    # ---- what happened --------------------------------------------------------------------------------------------

    def with_retired(self, stats: CommStats) -> CommStats:
        """Add what was exchanged before the module was wrapped again."""
        return stats if self._retired is None else self._retired + stats

    def _retire(self, stats: CommStats) -> None:
        self._retired = self.with_retired(stats)

    def _observe(self) -> Observed:
        """Return what is known of the exchange in force. A collective."""
        mine = self._strategy.gather_comm_stats()[self._strategy.global_rank]
        path = self._strategy._path
        cosine = None if path is None else path.mean_check.cosine
        return Observed(mine, None if cosine is None else float(cosine))

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put the decisions into a checkpoint."""
        if self.tuner is not None and "optimizer_states" in checkpoint:
            in_force = self.tuner.state.decisions[-1].choice if self.tuner.state.decisions else Choice()
            if self._pending is not None:
                in_force = Choice(self._strategy.compression.name, in_force.bucket_mb)
            checkpoint[KEY] = {
                "version": 1,
                "world": self._strategy.world_size,
                "in_force": {"method": in_force.method, "bucket_mb": in_force.bucket_mb},
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

    def close(self) -> None:
        """Let go of the module."""
        if self.tuner is not None:
            self.tuner.close()


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _without_summable(policy: AutoPolicy) -> AutoPolicy:
    """Leave out methods that a hierarchy would cut through."""
    allow = [word for word in policy.allow if not method_named(word).summable]
    values = {name: getattr(policy, name) for name in policy.__dataclass_fields__}
    return AutoPolicy(**values | {"allow": allow})


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled, wholly or in part: smaller buckets would cut its graphs."""
    return (
        any(m._compiled_call_impl is not None for m in module.modules())
        or hasattr(module, "_orig_mod")
        or (getattr(module, "_compiler_ctx", None) is not None)
    )


def _device_bytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_bytes("MemTotal")


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_bytes("MemAvailable")


def _host_bytes(field: str) -> int | None:
    """Read a field of Linux's memory table; None elsewhere."""
    try:
        with open("/proc/meminfo") as table:
            return next((int(line.split()[1]) * 1024 for line in table if line.startswith(field + ":")), None)
    except OSError:
        return None
