"""A module whose gradients are chosen, so that what must have been applied is known exactly."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommStats
from tests.methods import Case
from tests.strategies.toy import Fit, compresses, fit, state_of, strategy_of

__all__ = ["SHAPES", "Chosen", "Ledger", "assert_conserved", "chosen_gradient", "mean_gradient", "total", "train"]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "d": (40, 67),
    "d_bias": (67,),
    "g": (67, 61),
    "g_bias": (61,),
    "head": (61, 40),
}
"""``d...`` belong to the first of two optimizers, the others to the second."""


def chosen_gradient(name: str, number: int, rank: int) -> Tensor:
    """The gradient of a parameter in the backward pass of that number on a rank."""
    generator = torch.Generator().manual_seed(hash((list(SHAPES).index(name), number, rank)) % 2**31)
    return torch.randn(SHAPES[name], generator=generator)


def mean_gradient(name: str, number: int, world: int, users: Sequence[int] | None = None) -> Tensor:
    """Its mean over ranks in fp64; ranks that are not among the users count with zero."""
    ranks = range(world) if users is None else users
    mean = torch.zeros(SHAPES[name], dtype=torch.float64)
    for rank in ranks:
        mean += chosen_gradient(name, number, rank).double() / world
    return mean


class Chosen(pl.LightningModule):
    """Plain SGD at learning rate 1 from zero: the parameters are minus the sum of all that was applied.

    Args:
        optimizers: One or two.
    """

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def loss(self, number: int, names: Sequence[str] = tuple(SHAPES)) -> Tensor:
        """A loss with d loss / d parameter = :func:`chosen_gradient`; what is not named stays unused."""
        products = [(self.get_parameter(n) * chosen_gradient(n, number, self.global_rank)).sum() for n in names]
        return torch.stack(products).sum()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch_idx)

    @override
    def configure_optimizers(self) -> Any:
        if self.count == 1:
            return torch.optim.SGD(self.parameters(), 1.0)
        first = [p for n, p in self.named_parameters() if n.startswith("d")]
        second = [p for n, p in self.named_parameters() if not n.startswith("d")]
        return [torch.optim.SGD(first, 1.0), torch.optim.SGD(second, 1.0)]


@dataclass
class Ledger:
    """What one rank has after a fit.

    Args:
        applied: Sum of what was applied to each parameter.
        state: The residuals.
        stats: Counters.
        fit: The rest.
    """

    applied: dict[str, Tensor]
    state: dict[str, Any]
    stats: CommStats
    fit: Fit


def train(case: Case, make: Callable[[], Chosen], steps: int, strategy: Mapping[str, Any], **options: Any) -> Ledger:
    """Fit a module of chosen gradients."""
    ours, model = strategy_of(case, **strategy), make()
    ran = fit(ours, model, [torch.zeros(1)] * steps, **options)
    applied = {name: -p.detach().double() for name, p in model.named_parameters()}
    return Ledger(applied, state_of(ours), ours.comm_stats(), ran)


def total(gradients: Iterable[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(list(gradients)).sum(0)


def assert_conserved(ledgers: Sequence[Ledger], truth: Mapping[str, Tensor], case: Case) -> None:
    """What was applied plus what waits in residuals is the truth; and replicas are bit-equal.

    Casts have no residual: they may err by some roundings of gradients of about 1, far less than a lost gradient.
    """
    shards, tolerance = case.hierarchy, 2e-5 if case.lossy or not compresses(case) else 0.2
    waiting = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in SHAPES.items()}
    for ledger in ledgers:
        for kind, factor in (("first", max(shards, 1) / len(ledgers)), ("second", 1.0)):
            for name, parts in ledger.state.get(kind, {}).items():
                for first, values in parts:
                    waiting[name][first : first + values.numel()] += factor * values.double()
    for name, expected in truth.items():
        assert all(torch.equal(ledger.applied[name], ledgers[0].applied[name]) for ledger in ledgers)
        error = ledgers[0].applied[name] + waiting[name].view_as(expected) - expected
        assert error.abs().max() < tolerance, (name, error.abs().max())
        assert ledgers[0].applied[name].any() == expected.any()
