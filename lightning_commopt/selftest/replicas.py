"""Law 2: after every step the parameters have the same bits on all ranks. Law 13: all issue the same operations."""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import Engine, engine, gradients_of
from lightning_commopt.selftest.ground import Ground

__all__ = ["OPTIMIZERS", "Training", "order", "replicas", "training"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
_STEPS = 6


class Training(NamedTuple):
    """What a rank did in some steps.

    Args:
        parameters: Digests of the parameters after each step.
        issued: The operations that it issued, by group.
        last: The parameters after the last step.

    """

    parameters: list[str]
    issued: list[list[tuple[str, int]]]
    last: dict[str, Tensor]


def training(case: Case, optimizer: str, device: str, steps: int = 20, timeout: timedelta | None = None) -> Training:
    """Train on data that differ by rank; the first two steps are dense."""
    with engine(case, device=device, timeout=timeout, start_step=2) as made:
        history = train(made, OPTIMIZERS[optimizer](made.parameters.values()), steps)
        last = {name: p.detach().cpu().clone() for name, p in made.parameters.items()}
        return Training(history, made.issued, last)


def train(made: Engine, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """Pull every parameter towards data that differ by rank and step."""
    history = []
    for step in range(steps):
        data = gradients_of(made.rank, step)
        made.round({name: p.detach().cpu() - data[name] for name, p in made.parameters.items()})
        optimizer.step()
        made.path.step_done(True)
        history.append(digest(dict(made.parameters)))
    return history


def replicas(case: Case, ground: Ground) -> list[str]:
    """Say on which rank parameters have other bits than on rank 0."""
    mine = training(case, "momentum", ground.device, _STEPS, ground.timeout)
    ranks = ground.control.all_gather(mine.parameters)
    if all(history == ranks[0] for history in ranks):
        return []
    theirs = ground.control.broadcast(mine.last)
    apart = {name: float((mine.last[name] - theirs[name]).abs().max()) for name in theirs if theirs[name].numel()}
    if mine.parameters == ranks[0]:
        return []
    first = next(step for step, (a, b) in enumerate(zip(mine.parameters, ranks[0], strict=True), start=1) if a != b)
    worst = max(apart, key=lambda name: apart[name])
    return [
        f"its parameters have other bits than those of rank 0 from step {first} on; after {_STEPS} steps `{worst}` "
        f"differs by up to {apart[worst]:.3g}"
    ]


def order(case: Case, ground: Ground) -> list[str]:
    """Say where this rank issued another operation than the first rank of its group."""
    issued = training(case, "momentum", ground.device, 3, ground.timeout).issued
    ranks = ground.control.all_gather(issued)
    first_of_group = [ground.control.rank % case.hierarchy if case.hierarchy else 0]
    if case.hierarchy:
        first_of_group.append(ground.control.rank // case.hierarchy * case.hierarchy)
    return [
        fault
        for group, first in enumerate(first_of_group)
        for fault in _first_difference(issued[group], ranks[first][group], first)
    ]


def _first_difference(mine: list[tuple[str, int]], theirs: list[tuple[str, int]], rank: int) -> list[str]:
    for number, (own, other) in enumerate(zip(mine, theirs, strict=False), start=1):
        if own != other:
            return [f"operation {number} is {own[0]} of {own[1]} bytes, on rank {rank} {other[0]} of {other[1]} bytes"]
    return [] if len(mine) == len(theirs) else [f"{len(mine)} operations were issued, on rank {rank} {len(theirs)}"]
