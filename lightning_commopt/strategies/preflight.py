"""What is refused or compared before anything is sent."""

import platform
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, get_args

import lightning
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS

from lightning_commopt.__about__ import __version__
from lightning_commopt.compression import Uncompressed
from lightning_commopt.strategies.backends import OWN_BACKEND, check_backend
from lightning_commopt.strategies.nccl import same_on_all_ranks
from lightning_commopt.strategies.nonfinite import Nonfinite
from lightning_commopt.strategies.residual_checkpoint import ResidualPolicy

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy
    from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = [
    "check_devices",
    "check_model",
    "check_optimizers",
    "check_options",
    "check_residuals",
    "check_stall_timeout",
    "check_timeout",
    "check_trainable",
    "device_name",
    "fingerprint",
    "refuse_ddp_options",
    "versions",
    "warn_of_mixed_devices",
]

_NO_COMPRESSION = "choose `compression='none'`"


def check_options(
    strategy: "CommOptStrategy", start_step: int | None, nonfinite: str | None, residuals: str | None
) -> None:
    """Refuse options that are out of bounds or contradict each other.

    Args:
        strategy: The strategy.
        start_step: As the user gave it.
        nonfinite: As the user gave it.
        residuals: As the user gave it.

    Raises:
        ValueError: Saying what to do instead.

    """
    name, plain = strategy.compression.name, isinstance(strategy.compression, Uncompressed)
    if (
        strategy._ddp_comm_hook is not None
        or strategy._ddp_comm_state is not None
        or strategy._ddp_comm_wrapper is not None
    ):
        raise ValueError(
            "`ddp_comm_hook`, `ddp_comm_state` and `ddp_comm_wrapper` would replace our own hook: select a method with "
            "`compression=...`, or use Lightning's `DDPStrategy` for a hook of yours."
        )
    if strategy._model_averaging_period is not None:
        raise ValueError("`model_averaging_period` needs a `ddp_comm_hook`: use Lightning's `DDPStrategy` for it.")
    if start_step is not None and type(start_step) is not int:
        raise TypeError(f"`start_step={start_step!r}`: `start_step` must be an int, or None for the method's default.")
    if not isinstance(strategy.true_mean, bool):
        raise TypeError(f"`true_mean={strategy.true_mean!r}`: `true_mean` must be a bool.")
    check_timeout(strategy._timeout)
    check_stall_timeout(strategy.stall_timeout)
    cap = strategy._ddp_kwargs.get("bucket_cap_mb")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0):
        raise ValueError(f"`bucket_cap_mb={cap!r}`: `bucket_cap_mb` must be a number above 0, in MB.")
    if start_step is not None and start_step < 0:
        raise ValueError(f"`start_step={start_step}`: `start_step` must be >= 0, or None for the method's default.")
    if strategy._is_auto:
        _check_auto(start_step, nonfinite)
    if start_step and plain:
        raise ValueError(f"`start_step={start_step}` has no meaning for method `{name}`: leave it out.")
    check_residuals(residuals, name, strategy._is_auto or strategy.compression.error_feedback)
    if nonfinite is not None and nonfinite not in get_args(Nonfinite):
        raise ValueError(f"`nonfinite={nonfinite!r}` must be one of {', '.join(map(repr, get_args(Nonfinite)))}.")
    if nonfinite in ("error", "skip") and plain:
        raise ValueError(
            f"`nonfinite={nonfinite!r}` cannot be honoured by method `{name}`, which leaves gradients to DDP's own "
            "reducer: choose a compression method, or use `Trainer(detect_anomaly=True)`."
        )
    check_backend(strategy._process_group_backend)
    _check_hierarchy(strategy, name)
    if not plain:
        refuse_ddp_options(strategy, name)


def _check_auto(start_step: int | None, nonfinite: str | None) -> None:
    """Refuse what `auto` cannot honour, since it may choose no method at all."""
    if start_step:
        raise ValueError(
            f"`start_step={start_step}` has no meaning for `compression='auto'`, which begins with dense steps and "
            "says when it changes: leave it out, or choose a method yourself."
        )
    if nonfinite in ("error", "skip"):
        raise ValueError(
            f"`nonfinite={nonfinite!r}` cannot be honoured by `compression='auto'`, which may leave gradients to "
            "DDP's own reducer: leave it out (a method that `auto` takes ends all ranks at a gradient that is not "
            "finite), or choose a method yourself."
        )


def check_residuals(policy: str | None, method: str, kept: bool) -> None:
    """Refuse a policy for residuals in checkpoints that is none, or where there are no residuals."""
    if policy is not None and policy not in get_args(ResidualPolicy):
        raise ValueError(f"`residuals={policy!r}` must be one of {', '.join(map(repr, get_args(ResidualPolicy)))}.")
    if policy is not None and not kept:
        raise ValueError(
            f"`residuals={policy!r}` has no meaning for method `{method}`, which keeps none: leave it out."
        )


def check_timeout(limit: object) -> None:
    """Refuse what is no limit for torch's process groups."""
    if limit is not None and not isinstance(limit, timedelta):
        raise TypeError(f"`timeout={limit!r}` must be a `timedelta`, from `datetime`, or left out.")


def check_stall_timeout(limit: object) -> None:
    """Refuse a limit that is none."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float | timedelta):
        raise TypeError(f"`stall_timeout={limit!r}` must be a number of seconds, a `timedelta`, or None for `timeout`.")
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if not 1 <= seconds < float("inf"):
        raise ValueError(f"`stall_timeout={limit!r}` must be at least one second, or None for `timeout`.")


def _check_hierarchy(strategy: "CommOptStrategy", name: str) -> None:
    """Refuse a hierarchy that is none, or that the method cannot have."""
    hierarchy, method = strategy.hierarchy, strategy.compression
    if hierarchy is False or hierarchy == "auto":
        return
    if isinstance(hierarchy, bool) or not isinstance(hierarchy, int) or hierarchy < 2:
        raise ValueError(f"`hierarchy={hierarchy!r}` must be 'auto', False, or the number of ranks on a node (>= 2).")
    if strategy._is_auto:
        return
    if isinstance(method, Uncompressed):
        raise ValueError(
            f"`hierarchy={hierarchy}` has no meaning for method `{name}`: DDP's own reducer decides how gradients "
            "travel (NCCL has its own hierarchy). Leave it out, or choose a method."
        )
    if method.summable:
        raise ValueError(
            f"`hierarchy={hierarchy}` with method `{name}`: a shard would cut through its matrices, and its few bytes "
            "travel in one all-reduce. Leave `hierarchy` out."
        )


def refuse_ddp_options(strategy: "CommOptStrategy", name: str) -> None:
    """Refuse DDP arguments that exclude a hook or change buckets under it.

    Raises:
        ValueError: Saying what to do instead.

    """
    reasons = {
        "static_graph": "it delays the first exchange past our hook",
        "mixed_precision": "DDP registers a hook of its own for it; use `Trainer(precision=...)`",
        "delay_all_reduce_named_params": "these parameters would bypass our hook",
    }
    for option, reason in reasons.items():
        if strategy._ddp_kwargs.get(option):
            raise ValueError(f"`{option}` cannot be combined with method `{name}`: {reason}. Or {_NO_COMPRESSION}.")


def check_devices(strategy: "CommOptStrategy | CommOptShardedStrategy") -> None:
    """Refuse devices and backends on which gradients cannot be exchanged.

    Raises:
        ValueError: Saying what to do instead.

    """
    device, backend = strategy.root_device.type, strategy._process_group_backend
    if device == "mps":
        raise ValueError("MPS devices have no process group backend: use `Trainer(accelerator='cpu')` or CUDA devices.")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"Strategy `commopt` runs on CPU and CUDA devices, not on {device}.")
    check_backend(backend, device)
    expected = OWN_BACKEND[device]
    if backend not in (None, expected) and not isinstance(strategy.compression, Uncompressed):
        raise ValueError(
            f"`process_group_backend={backend!r}` with method `{strategy.compression.name}` on {device}: compressed "
            f"payloads travel by {expected} there. Leave `process_group_backend` out, or {_NO_COMPRESSION}."
        )


def check_model(strategy: "CommOptStrategy", model: nn.Module) -> None:
    """Refuse models whose gradients a method cannot carry.

    Raises:
        ValueError: Naming the parameter or module, and what to do instead.

    """
    method = strategy.compression.name
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"`{name}` yields sparse gradients, which method `{method}` does not carry: set `sparse=False` there, "
                f"or {_NO_COMPRESSION}."
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(
                f"`{name}` is {parameter.dtype}, which method `{method}` does not carry: {_NO_COMPRESSION}."
            )
    if getattr(torch._dynamo.config, "optimize_ddp", None) == "python_reducer":
        raise ValueError("`torch._dynamo.config.optimize_ddp='python_reducer'` bypasses our hook: leave it at True.")


def check_trainable(model: nn.Module, wrapped: Collection[int]) -> None:
    """Refuse a parameter that became trainable within a batch: replicas would drift apart without a word.

    Args:
        model: The module.
        wrapped: Identities of the parameters that were trainable when DDP wrapped it.

    Raises:
        RuntimeError: Naming the parameter, and what to do instead.

    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in wrapped:
            raise RuntimeError(
                f"`{name}` became trainable within a batch: DDP would not exchange its gradient, and ranks would drift "
                "apart. Unfreeze it before the batch begins, in `on_train_epoch_start` or `on_train_batch_start`."
            )


def check_optimizers(strategy: "CommOptStrategy | CommOptShardedStrategy") -> None:
    """Refuse ways of stepping under which `nonfinite` cannot be honoured.

    Raises:
        ValueError: Saying what to do instead.

    """
    if strategy.nonfinite == "skip" and any(isinstance(o, LBFGS) for o in strategy.optimizers):
        raise ValueError("`nonfinite='skip'` cannot skip LBFGS, which evaluates its closure itself: choose 'error'.")


def versions() -> dict[str, str]:
    """Return what is installed, which must be equal on all ranks."""
    return {
        "lightning_commopt version": __version__,
        "torch version": torch.__version__,
        "lightning version": lightning.__version__,
        "python version": platform.python_version(),
    }


def fingerprint(strategy: "CommOptStrategy", model: nn.Module) -> dict[str, str]:
    """Return what must be equal on all ranks, by field."""
    fields = {
        **versions(),
        "compression": repr(strategy.compression),
        "auto": repr(strategy._policy),
        "hierarchy": str(strategy.hierarchy),
        "start_step": str(strategy.start_step),
        "nonfinite": strategy.nonfinite,
        "residuals": str(strategy._checkpoint.policy),
        "true_mean": str(strategy._short_window.true_mean),
        "uneven": strategy._uneven.policy,
        "stall_timeout": str(strategy.stall_timeout),
        "DDP arguments": repr(sorted((k, str(v)) for k, v in strategy._ddp_kwargs.items())),
        "NCCL variables": repr(sorted(same_on_all_ranks(strategy.nccl).items())),
        "precision": str(strategy.precision_plugin.precision),
        "number of parameters": str(sum(1 for _ in model.parameters())),
    }
    for name, p in model.named_parameters():
        fields[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    return fields


def device_name(device: torch.device) -> str:
    """Return the kind of a device, as far as it decides how numbers are rounded."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


def warn_of_mixed_devices(names: Sequence[str]) -> None:
    """Say which rank runs on another kind of device than rank 0.

    Args:
        names: :func:`device_name` by rank.

    """
    for rank, name in enumerate(names):
        if name != names[0]:
            rank_zero_warn(
                f"Rank {rank} runs on {name}, rank 0 on {names[0]}: bit-equal replicas are promised on identical "
                "devices only."
            )
            return
