"""Weights for a module that was made on the meta device, where it has none."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.sandbox import isolated_randomness, seed_all

__all__ = ["is_on_meta", "materialise"]


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers without values."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module,
    first_names: Mapping[int, str],
    device: torch.device,
    seed: int,
    state: Mapping[str, Tensor] | None = None,
    dummies: Collection[str] = (),
) -> list[str]:
    """Give values to what is on the meta device. Parameters stay the same objects.

    They are those of a state dict, else those that the module's own ``reset_parameters`` gives, which is called under a
    seed made from ``seed`` and the module's name: a weight does not depend on how many stages there are, or where. A
    tied parameter is initialised by the module of its first name; where that is missing, it stays NaN.

    Args:
        module: The model, or what there is of it on this rank.
        first_names: The first name of each parameter of the whole model, by identity.
        device: Where the values are to be.
        seed: Of the run, the same on all ranks.
        state: Values by name, of some parameters and buffers or all.
        dummies: Names of parameters that only hold the places of those on other ranks.

    Returns:
        The names of what was on the meta device.

    Raises:
        PipelineError: A module cannot initialise what it has.

    """
    state = state or {}
    born: dict[str, list[str]] = {}
    modules = dict(module.named_modules())
    for path, part in modules.items():
        _check_metric(path, part)
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and tensor.is_meta:
                _allocate(part, key, tensor, device)
                born.setdefault(path, []).append(key)
    seen: set[int] = set()  # a tied parameter was on the meta device for the first of its modules alone
    with torch.no_grad(), isolated_randomness(device):
        for path, keys in reversed(list(born.items())):
            part = modules[path]
            first = (_name(path, key) for key in keys if _is_first(part, key, _name(path, key), first_names))
            if missing := [name for name in first if name not in state]:
                seed_all((seed * 1_000_003 + zlib.crc32(path.encode())) % 2**63)
                with _writable(part, [key for key in part._parameters if _name(path, key) in dummies]):
                    _reset(part, missing[0])
        for path, part in modules.items():
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                name = _name(path, key)
                if tensor is not None and name in state and name not in dummies and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensor.copy_(state[name])
    for path, keys in born.items():
        for key in keys:
            name, tensor = _name(path, key), getattr(modules[path], key)
            if _is_first(modules[path], key, name, first_names) and _is_unset(tensor):
                raise PipelineError(
                    f"`{name}` is on the meta device, and `reset_parameters` of its `{type(modules[path]).__name__}` "
                    "does not set all of it: let it, or make this module on the CPU."
                )
    return [_name(path, key) for path, keys in born.items() for key in keys]


@contextmanager
def _writable(module: nn.Module, keys: Collection[str]) -> Iterator[None]:
    """Let an initialisation write where there are no values; it draws the same numbers on every rank."""
    kept = {key: module._parameters[key] for key in keys}
    for key, dummy in kept.items():
        assert dummy is not None
        module._parameters[key] = nn.Parameter(torch.empty_like(dummy, memory_format=torch.contiguous_format))
    try:
        yield
    finally:
        module._parameters.update(kept)


def _name(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_first(module: nn.Module, key: str, name: str, first_names: Mapping[int, str]) -> bool:
    return first_names.get(id(getattr(module, key)), name) == name


def _allocate(module: nn.Module, key: str, tensor: Tensor, device: torch.device) -> None:
    """Give a tensor memory, filled with what no initialisation leaves."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        values.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        values.fill_(torch.iinfo(tensor.dtype).max)
    if isinstance(tensor, nn.Parameter):
        torch.utils.swap_tensors(tensor, nn.Parameter(values, requires_grad=tensor.requires_grad))
    else:
        module._buffers[key] = values


def _reset(module: Any, missing: str) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is None:
        raise PipelineError(
            f"`{missing}` is on the meta device, and its `{type(module).__name__}` has no `reset_parameters` that "
            "could give it values: write one, make this module on the CPU, or start from a checkpoint."
        )
    reset()


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


def _check_metric(path: str, part: nn.Module) -> None:
    if isinstance(part, Metric) and any(isinstance(v, Tensor) and v.is_meta for v in part._defaults.values()):
        raise PipelineError(f"The metric `{path}` is on the meta device, where it cannot count: make it on the CPU.")
