"""Law 3: whatever the shapes and the size of a bucket, every element is reduced exactly once in a round."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.engine import SHAPES, Engine, engine
from lightning_commopt.selftest.ground import Ground

__all__ = ["lost_or_repeated", "once"]

_BUCKETS = ((0.004, 0), (0.05, 1024))  # MB, and elements from which tensors are compressed


def once(case: Case, ground: Ground) -> list[str]:
    """Say which parameters have elements that were lost, counted twice, or took another's place."""
    on = ground.device, ground.timeout
    found = [name for cap, exact in _BUCKETS for name in lost_or_repeated(case, SHAPES, cap, exact, *on)]
    return [f"elements of `{name}` were lost, counted twice, or misplaced" for name in dict.fromkeys(found)]


def lost_or_repeated(
    case: Case,
    shapes: Mapping[str, tuple[int, ...]],
    cap: float,
    exact_below: int,
    device: str,
    timeout: timedelta | None = None,
) -> list[str]:
    """Return the parameters of which two rounds do not add up, in numbers of which any fault costs 1 or more.

    Args:
        case: The method.
        shapes: Parameters by name.
        cap: Size of a bucket in MB.
        exact_below: Elements from which tensors are compressed.
        device: ``cpu`` or ``cuda``.
        timeout: Of the groups.

    """
    changed = replace(case, method=replace(case.method, exact_below=exact_below))
    with engine(changed, shapes, cap=cap, device=device, timeout=timeout) as made:
        results = [_rounded(made, round) for round in range(2)]
        wrong = []
        for name, owed in made.residuals().items():
            off = owed.to(made.device)
            dist.all_reduce(off, group=made.ddp.process_group)
            off += sum(result[name].double() for result in results)
            off -= sum(mean_of(shapes[name], round).double().to(made.device) for round in range(2))
            # A cast makes no error in these numbers; rounding of fp32 makes less than 2^-10.
            if not bool((off.abs() <= (2.0**-10 if case.lossy else 0.0)).all()):
                wrong.append(name)
        return wrong


def integers(shape: tuple[int, ...], rank: int, world: int, round: int) -> Tensor:
    """Return whole numbers below 64 whose mean over ranks is :func:`mean_of`: that plus what adds up to zero."""
    around = torch.arange(torch.Size(shape).numel()).view(shape) % 7 + 1
    return mean_of(shape, round) + around * (2 * rank - (world - 1))


def mean_of(shape: tuple[int, ...], round: int) -> Tensor:
    """Return whole numbers from -20 to 20, none of which is 0."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return (index * 13 + 5 * round) % 20 + 1 - 21 * ((index + round) % 2)


def _rounded(made: Engine, round: int) -> dict[str, Tensor]:
    """Return the results of an applied round."""
    return made.step({name: integers(shape, made.rank, made.world, round) for name, shape in made.shapes.items()})
