"""What is refused or compared before a sharded module trains."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, get_args

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_commopt.compression import Uncompressed
from lightning_commopt.routes import Topology
from lightning_commopt.sharded import ShardedPath, ShardGroups
from lightning_commopt.strategies.backends import check_backend
from lightning_commopt.strategies.explain import KERNELS, ROUTES
from lightning_commopt.strategies.nonfinite import Nonfinite
from lightning_commopt.strategies.preflight import check_residuals, check_stall_timeout, check_timeout, versions

if TYPE_CHECKING:
    from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = [
    "check_callbacks",
    "check_groups",
    "check_references",
    "check_sharded_options",
    "explain_sharded",
    "refuse_sizes",
    "shard_size",
    "sharded_fingerprint",
]


def check_sharded_options(
    strategy: "CommOptShardedStrategy",
    start_step: int | None,
    nonfinite: str | None,
    residuals: str | None,
) -> None:
    """Refuse options that are out of bounds, or that this strategy cannot honour.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: Saying what to do instead.

    """
    if strategy.sync != "every_step":
        raise ValueError(
            f"`sync={strategy.sync!r}`: replicas of a sharded model meet at every step. Leave `sync` out, and raise "
            "`Trainer(accumulate_grad_batches=...)` to meet less often."
        )
    hierarchy = strategy.hierarchy
    if hierarchy is False:
        raise ValueError(
            "`hierarchy=False`: shards stay inside nodes, which is a hierarchy. Use 'auto' or the number of ranks that "
            "share a replica, or `CommOptStrategy` for a model that fits into one device."
        )
    if hierarchy != "auto" and (isinstance(hierarchy, bool) or not isinstance(hierarchy, int) or hierarchy < 2):
        raise ValueError(
            f"`hierarchy={hierarchy!r}` must be 'auto', or the number of ranks that share a replica (>= 2)."
        )
    if start_step is not None and type(start_step) is not int:
        raise TypeError(f"`start_step={start_step!r}`: `start_step` must be an int, or None for the method's default.")
    if start_step is not None and start_step < 0:
        raise ValueError(f"`start_step={start_step}`: `start_step` must be >= 0, or None for the method's default.")
    if start_step and isinstance(strategy.compression, Uncompressed):
        raise ValueError(f"`start_step={start_step}` has no meaning for method `none`: leave it out.")
    if nonfinite is not None and nonfinite not in get_args(Nonfinite):
        raise ValueError(f"`nonfinite={nonfinite!r}` must be one of {', '.join(map(repr, get_args(Nonfinite)))}.")
    check_residuals(residuals, strategy.compression.name, strategy._keeps_residuals)
    flags = {"true_mean": strategy.true_mean, "save_distributed_checkpoint": strategy._save_distributed_checkpoint}
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{option}={value!r}`: `{option}` must be a bool.")
    check_timeout(strategy._timeout)
    check_stall_timeout(strategy.stall_timeout)
    check_backend(strategy._process_group_backend)
    _check_wrap(strategy.wrap)


def refuse_sizes(options: Mapping[str, object]) -> None:
    """Refuse Lightning's arguments for the sizes of its mesh.

    Raises:
        ValueError: Saying what to do instead.

    """
    for option in ("data_parallel_size", "tensor_parallel_size"):
        if options.get(option, "auto") != "auto":  # LightningCLI passes defaults on
            raise ValueError(
                f"`{option}={options[option]!r}`: replicas and shards follow from the nodes. Use `hierarchy=...` for "
                "the number of ranks that share a replica, or Lightning's `ModelParallelStrategy` for tensors."
            )


def _check_wrap(wrap: object) -> None:
    if wrap is None:
        return
    if isinstance(wrap, bool | str) or not isinstance(wrap, int | list | tuple):
        raise TypeError(f"`wrap={wrap!r}` must be a list of module classes, a number of parameters, or None.")
    if isinstance(wrap, int):
        if wrap < 1:
            raise ValueError(f"`wrap={wrap}`: a group must have at least one parameter.")
        return
    if not wrap:
        raise ValueError("`wrap=[]` selects no module: name at least one class, or leave `wrap` out.")
    for kind in wrap:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"`wrap` has {kind!r}, which is neither a module class nor the name of one.")


def shard_size(topology: Topology, world: int) -> int:
    """Return over how many ranks to shard.

    Raises:
        ValueError: The nodes do not allow for shards inside them.

    """
    if topology.hierarchical:
        return topology.ranks_per_node
    if topology.nodes == 1:
        return world
    raise ValueError(
        f"Parameters cannot be sharded inside nodes, since {topology.reason}: give the number of ranks that share a "
        "replica (`hierarchy=...`), or use `CommOptStrategy` for a model that fits into one device."
    )


def check_groups(module: nn.Module, groups: ShardGroups, mesh: DeviceMesh, keeps_residuals: bool) -> None:
    """Refuse a sharding whose gradients would not be exchanged, or not by our hook.

    Args:
        module: The LightningModule.
        groups: Of it.
        mesh: The 1-D mesh of shards.
        keeps_residuals: Whether the method has error feedback.

    Raises:
        TypeError: Nothing is sharded.
        ValueError: Naming the parameter, and what to do instead.

    """
    if not groups.groups:
        raise TypeError("`configure_model` sharded nothing: call `fully_shard(..., mesh=self.device_mesh['shard'])`.")
    for group in groups:
        managed, name = group.managed, group.parameters[0].name
        theirs: DeviceMesh = managed.mesh_info.mesh
        if theirs.ndim != 1 or theirs.mesh.flatten().tolist() != mesh.mesh.flatten().tolist():
            raise ValueError(
                f"The group with `{name}` is sharded over another mesh: use `mesh=self.device_mesh['shard']`. On a "
                "mesh of two dimensions FSDP2 would all-reduce uncompressed by itself."
            )
        reduced = managed.mp_policy.reduce_dtype or group.parameters[0].dtype
        if reduced not in (torch.float32, torch.bfloat16) or managed.force_sum_reduction_for_comms:
            raise ValueError(
                f"The group with `{name}` is reduced in {reduced}, which FSDP2 divides after our hook: make its "
                "parameters float32 or bfloat16; where `configure_model` shards, use "
                "`mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)` and no "
                "`set_force_sum_reduction_for_comms`."
            )
        for parameter in group.parameters:
            if keeps_residuals and parameter.shard_dim != 0:
                raise ValueError(
                    f"`{parameter.name}` is sharded along dimension {parameter.shard_dim}; residuals are kept for "
                    "dimension 0 alone. Leave `shard_placement_fn` out, or choose 'none', 'bf16' or 'fp16'."
                )
    for name, tensor in module.named_parameters():
        if tensor.requires_grad and name not in groups.parameters:
            raise ValueError(
                f"`{name}` belongs to no module that was sharded, so its gradient would stay this rank's own: call "
                "`fully_shard` on a module that has it, or freeze it."
            )


def check_callbacks(trainer: "pl.Trainer") -> None:
    """Refuse callbacks that average parameters: they copy whole ones, and a rank has shards.

    Raises:
        ValueError: Naming the callback.

    """
    for callback in trainer.callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if kinds & {"StochasticWeightAveraging", "WeightAveraging"}:
            raise ValueError(
                f"`{type(callback).__name__}` averages whole parameters, and each rank has shards of them: leave it "
                "out, or use `CommOptStrategy` for a model that fits into one device."
            )


def check_references(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers of parameters that the module no longer has, since sharding replaced them.

    Raises:
        ValueError: Saying what to do instead.

    """
    own = set(map(id, module.parameters()))
    for optimizer in optimizers:
        stale = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if stale:
            raise ValueError(
                f"`{type(optimizer).__name__}` has {stale} parameters that are not, or no longer, those of the "
                "LightningModule: sharding replaces parameters, so that it would train nothing. Make the optimizer in "
                "`configure_optimizers`, from `self.parameters()` as they are there, not from references of `__init__` "
                "or `setup`."
            )


def sharded_fingerprint(strategy: "CommOptShardedStrategy", module: nn.Module) -> dict[str, str]:
    """Return what must be equal on all ranks, by field."""
    timeout = strategy.stall_timeout
    fields = {
        **versions(),
        "compression": repr(strategy.compression),
        "hierarchy": str(strategy.hierarchy),
        "wrap": str(strategy.wrap),
        "shard_gather": repr(strategy.shard_gather),
        "shard_scatter": repr(strategy.shard_scatter),
        "start_step": str(strategy.start_step),
        "nonfinite": strategy.nonfinite,
        "residuals": str(strategy._checkpoint.policy),
        "true_mean": str(strategy.true_mean),
        "uneven": strategy._uneven.policy,
        "stall_timeout": str(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout),
        "precision": str(strategy.precision_plugin.precision),
        "number of parameters": str(sum(1 for _ in module.parameters())),
    }
    for name, p in module.named_parameters():
        fields[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    return fields


def explain_sharded(strategy: "CommOptShardedStrategy") -> str:
    """Return one line: how the model is sharded, the method between replicas, the route, the codec, and the memory."""
    method, shards, replicas = strategy.compression, strategy.shard_mesh.size(), strategy.replicas
    sharded = f"commopt: FSDP2 over {shards} rank{'s' * (shards > 1)} of a node"
    path = strategy._path
    for words, codec in (("parameters", strategy.shard_gather), ("gradients", strategy.shard_scatter)):
        sharded += "" if codec is None else f", {words} by `{codec!r}`"
    if replicas == 1:
        memory = "" if path is None else f"; extra memory about {_memory_mb(path):.1f} MB a rank"
        return f"{sharded}; method `{method.name}` is not active: there is one replica{memory}."
    if path is None:
        return f"{sharded}; method `{method!r}` will be in force between {replicas} replicas during fit."
    groups = len(path.groups.groups)
    dense = f", after {path.start_step} dense steps" if path.start_step else ", from the first step"
    nonfinite = "the gradient scaler skips the step" if strategy._steps is not None else strategy.nonfinite
    return (
        f"{sharded}, {groups} group{'s' * (groups > 1)}; method `{method!r}` is in force between {replicas} replicas"
        f"{dense}; route {ROUTES[type(path.route)]}; {KERNELS[path.kernels]}; non-finite gradients: {nonfinite}; "
        f"extra memory about {_memory_mb(path):.1f} MB a rank."
    )


def _memory_mb(path: ShardedPath) -> float:
    largest = max(sum(p.numel() for p in group.parameters) for group in path.groups)
    return path.expected_memory_bytes(largest) / 1e6
