"""Which modules become FSDP2 groups when the user does not say so with ``fully_shard``."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_commopt.sharded.parameters import send_from_first, sharded_modules

__all__ = [
    "Wrap",
    "announce_backward",
    "explain_uncalled",
    "gather_again",
    "mixed_precision",
    "shard_automatically",
    "shard_unless_sharded",
    "sharded_by_us",
]

Wrap = Sequence[type[nn.Module] | str] | int | None
"""Classes of modules (or their names), or the smallest number of parameters of a group, or None for a million."""

_SMALLEST_GROUP = 1_000_000
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that use parameters of their children without calling them."""

_ours: "WeakKeyDictionary[nn.Module, dict[str, str]]" = WeakKeyDictionary()
"""What each module was sharded with, by option."""


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Return what FSDP2 gathers and reduces under a Trainer's precision: halves are gathered, sums are fp32."""
    halves = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if precision in halves:
        return MixedPrecisionPolicy(halves[precision], torch.float32)
    if precision in ("bf16-true", "16-true"):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def sharded_by_us(module: nn.Module) -> bool:
    """Whether :func:`shard_automatically` has seen the module."""
    return module in _ours


def shard_unless_sharded(module: nn.Module, mesh: DeviceMesh, wrap: Wrap, precision: str) -> None:
    """Shard a LightningModule whose `configure_model` did not; arguments as for :func:`shard_automatically`.

    Raises:
        ValueError: It did, and ``wrap`` is given, too.

    """
    if not sharded_modules(module):
        shard_automatically(module, mesh, wrap, precision)
    elif not sharded_by_us(module):
        if wrap is not None:
            raise ValueError("`wrap` has no effect, since `configure_model` shards the module: leave one of them out.")
    else:
        for option, now in _sharded_with(mesh, wrap, precision).items():
            before = _ours[module][option]
            if now != before:
                raise ValueError(
                    f"An earlier Trainer sharded this module with {option} {before}, which stays; this one has {now}. "
                    "Give it the same, or a new module (`load_from_checkpoint`)."
                )


def _sharded_with(mesh: DeviceMesh, wrap: Wrap, precision: str) -> dict[str, str]:
    return {"precision": precision, "`wrap`": str(wrap), "ranks that share a replica:": str(mesh.size())}


def shard_automatically(module: nn.Module, mesh: DeviceMesh, wrap: Wrap, precision: str) -> None:
    """Shard a LightningModule; all its parameters begin as those of rank 0. A collective.

    What ``wrap`` selects becomes a group each, and what is left is the module's own. Steps of the module gather it, so
    that they may use every parameter.

    Args:
        module: The LightningModule.
        mesh: 1-D: the ranks over which to shard.
        wrap: What becomes a group.
        precision: The Trainer's.

    Raises:
        ValueError: ``wrap`` names what is not there, or selects nothing.

    """
    policy = mixed_precision(precision)
    rest = replace(policy, param_dtype=None)  # its modules see batches and outputs of groups: autocast deals with them
    _begin_alike(module, mesh.device_type)
    chosen = list(_chosen(module, wrap))
    if isinstance(wrap, Sequence):
        missing = [kind for kind in wrap if not any(_is_chosen(part, 0, [kind]) for part in module.modules())]
        if missing or not chosen:
            names = ", ".join(f"`{kind if isinstance(kind, str) else kind.__name__}`" for kind in missing or wrap)
            raise ValueError(f"`wrap`: there is no {names} in the model whose parameters are its own.")
    for part in chosen:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=rest)
    for step in _STEPS:
        register_fsdp_forward_method(module, step)
    _ours[module] = _sharded_with(mesh, wrap, precision)


def announce_backward(module: nn.Module, loss: Tensor) -> None:
    """Tell FSDP2 of a backward that begins inside a step of the module, under manual optimisation."""
    assert isinstance(module, FSDPModule)
    module._get_fsdp_state()._register_pre_backward_hook(loss)


def gather_again(module: nn.Module) -> None:
    """Give a step of the module that goes on after a backward or an optimizer step the parameters as they are now."""
    assert isinstance(module, FSDPModule)
    module.reshard()
    module.unshard()


def explain_uncalled(error: BaseException) -> None:
    """Add to torch's error about a parameter that is sharded where a step uses it why that is, and what to do."""
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        error.args = (
            f"{error} A step used a parameter that was not gathered, since the module that gathers it was not called, "
            "as in `functional.linear(x, self.embedding.weight)` or `self.vae.encode(x)`. Leave that module out of "
            "`wrap` by a list of others (`wrap=['Block']`) or a larger number; what is left over is gathered for the "
            "whole step. In a `configure_model` that shards, use `register_fsdp_forward_method`.",
        )


def _begin_alike(module: nn.Module, device: str) -> None:
    """Give all ranks rank 0's parameters, one by one, so that no device has to hold the whole model."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            sent = parameter.detach().to(device)
            send_from_first(sent)
            parameter.detach().copy_(sent)


def _chosen(module: nn.Module, wrap: Wrap) -> Iterator[nn.Module]:
    """Yield the modules that become groups, children before their parents."""
    users: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    taken: set[int] = set()
    for part in _inside_out(module):
        own = [p for p in part.parameters() if id(p) not in taken]
        if part is module or not own or not _is_chosen(part, sum(p.numel() for p in own), wrap):
            continue
        uses = [id(p) for m in part.modules() for p in m.parameters(recurse=False)]
        if any(uses.count(id(p)) < users[id(p)] for p in own):
            continue  # it shares a parameter with a module outside
        taken.update(map(id, own))
        yield part


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, _WHOLE):
        for child in module.children():
            yield from _inside_out(child)
    yield module


def _is_chosen(part: nn.Module, numel: int, wrap: Wrap) -> bool:
    if isinstance(part, (*_CONTAINERS, FSDPModule)) or type(part).forward is nn.Module.forward:
        return False  # it is never called, so that nothing would gather it
    if isinstance(wrap, int) or wrap is None:
        return numel >= (_SMALLEST_GROUP if wrap is None else wrap)
    names = {kind.__name__ for kind in type(part).__mro__}
    return any(kind in names if isinstance(kind, str) else isinstance(part, kind) for kind in wrap)
