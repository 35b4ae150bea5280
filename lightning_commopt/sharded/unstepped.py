"""Optimizer state of parameters that no step has reached: checkpoints of shards must have it, and training must not."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["filled_in", "forget_states", "unstepped_names"]


def unstepped_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the parameters that are trained and have no state, though others of the optimizer have."""
    missing = set(map(id, _unstepped(optimizer)))
    return [name for name, p in module.named_parameters() if id(p) in missing]


@contextmanager
def filled_in(optimizer: Optimizer) -> Iterator[None]:
    """Let all parameters that are trained have state: a load expects it of all, or none.

    It is what a first step with a gradient of zeros makes of copies, with its count of steps at 0. Afterwards it is
    gone.
    """
    missing = _unstepped(optimizer)
    try:
        states = _first_states(optimizer, missing) if missing else {}
    except Exception as error:  # of whatever optimizer: the checkpoint has the weights at least
        states = {}
        rank_zero_warn(
            f"`{type(optimizer).__name__}` has no state for {len(missing)} parameters that no step has reached, and "
            f"makes none for a gradient of zeros ({error}): this checkpoint cannot be resumed while they are trained."
        )
    optimizer.state.update(states)
    try:
        yield
    finally:
        for parameter in states:
            del optimizer.state[parameter]


def forget_states(module: nn.Module, optimizer: Optimizer, names: Iterable[str]) -> None:
    """Take the state of parameters away that was only filled in, so that their first step is their first."""
    parameters = dict(module.named_parameters())
    for name in names:
        if name in parameters:
            optimizer.state.pop(parameters[name], None)


def _unstepped(optimizer: Optimizer) -> list[Tensor]:
    if not optimizer.state:
        return []  # it keeps none, or begins
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in parameters if p.requires_grad and p not in optimizer.state]


def _first_states(optimizer: Optimizer, parameters: Iterable[Tensor]) -> dict[Tensor, dict[str, object]]:
    copies = {p: p.detach().clone().requires_grad_() for p in parameters}
    for own in copies.values():
        own.grad = torch.zeros_like(own)
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    groups = [
        group | {"params": [copies[p] for p in group["params"] if p in copies]} for group in optimizer.param_groups
    ]
    other.param_groups = [
        group | dict.fromkeys(group.keys() & {"weight_decay"}, 0.0) for group in groups if group["params"]
    ]
    type(optimizer).step(other)
    states = {p: dict(other.state[own]) for p, own in copies.items() if own in other.state}
    for state in states.values():
        if isinstance(count := state.get("step"), Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = 0
    return states
