"""A checkpoint in one file, with the state of optimizers as `Optimizer.state_dict` has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_commopt.sharded.unstepped import forget_states

__all__ = ["load_whole", "whole_optimizer_state"]


def whole_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole state on rank 0, and nothing elsewhere. A collective.

    Its parameters are numbered in the order of the optimizer's groups, as everywhere outside of FSDP.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    named: Any = get_optimizer_state_dict(module, optimizer, options=options)
    if not named:
        return {}
    numbers: dict[str, int] = {}
    for group in named["param_groups"]:
        numbers |= {name: len(numbers) + place for place, name in enumerate(group["params"])}
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[name]: state for name, state in named["state"].items()}, "param_groups": groups}


def load_whole(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load weights, and the state of optimizers, of whichever strategy wrote them. A collective.

    Args:
        path: Of the file.
        module: It is sharded.
        optimizers: Of it; none outside of a fit.
        strict: Whether all keys of the module must be there.
        weights_only: As for :func:`torch.load`.

    Returns:
        What else is in the file.

    Raises:
        KeyError: It has no state of optimizers, and there are some.

    """
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    if optimizers and "optimizer_states" not in checkpoint:
        raise KeyError(f"`{path}` has weights alone, so that no fit can go on from it: load them into a new module.")
    _load_raw_module_state(checkpoint.pop("state_dict"), module, strict=strict)
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        if saved["state"]:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            named = _named(saved, module, optimizer)
            set_optimizer_state_dict(module, optimizer, named, options=options)
            forget_states(
                module, optimizer, [n for n, _ in module.named_parameters() if _plain(n) not in named["state"]]
            )
            continue
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):  # torch wants some state
            group.update({option: value for option, value in values.items() if option != "params"})
    return checkpoint


def _named(saved: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return state by the names of parameters, which have the places in their groups that they had."""
    of = {id(p): _plain(name) for name, p in module.named_parameters()}
    names: dict[int | str, str] = {}
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        names |= {number: of[id(p)] for number, p in zip(values["params"], group["params"], strict=True)}
    groups = [group | {"params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def _plain(name: str) -> str:
    """Return the name of a parameter as it is in the file, where `torch.compile` adds nothing."""
    return name.replace("_orig_mod.", "")
