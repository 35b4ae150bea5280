"""The books of law 1: what ranks put in, what they got, and what is still owed."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.selftest.engine import Engine, gradients_of

__all__ = ["Ledger"]


class Ledger:
    """Adds up, in fp64, the true means of all rounds and the results that were applied.

    It also adds up by how much the two may differ. Each rounding of fp32 errs by at most ``2^-24`` of the largest
    number at hand, and a round has about a dozen of them and one for each rank that is added: that is all for a method
    with error feedback, whatever it drops. A cast may lose what it states for each hop.

    Args:
        engine: Whose books these are.
        sums: The :attr:`sums` of another ledger, to go on from.

    """

    def __init__(self, engine: Engine, sums: tuple[dict[str, Tensor], ...] | None = None) -> None:
        self.engine = engine
        self.expected, self.delivered, self.allowance = sums or (self._zeros(), self._zeros(), self._zeros())

    @property
    def sums(self) -> tuple[dict[str, Tensor], ...]:
        """True means, results, and by how much they may differ; the same on every rank."""
        return self.expected, self.delivered, self.allowance

    def expect(self, round: int, names: Sequence[Collection[str]] | None = None, casts: int = 1) -> None:
        """Add the true mean of a round.

        Args:
            round: Which gradients.
            names: The parameters that each rank used; None for all.
            casts: How often these gradients travel before they are applied.

        """
        world, case = self.engine.world, self.engine.case
        hops = casts * (1 + self.engine.path.route.second_hop)
        largest: dict[str, float] = {}
        for rank in range(world):
            used = gradients_of(rank, round, self.engine.shapes, None if names is None else names[rank])
            for name, gradient in used.items():
                self.expected[name] += gradient.double() / world
                self.allowance[name] += hops * 1.01 * case.relative * gradient.double().abs() / world
                largest[name] = max(largest.get(name, 0.0), _largest(gradient))
        for name, size in largest.items():
            self.allowance[name] += casts * 2.0**-24 * (12 + world) * size
            self.allowance[name] += hops * case.absolute * max(largest.values())

    def deliver(self, results: Mapping[str, Tensor | None], names: Collection[str] | None = None) -> None:
        """Add what was applied, in true units; ``names`` are the parameters that it was applied to, None for all."""
        for name, result in results.items():
            if result is not None and (names is None or name in names):
                self.delivered[name] += result.double().cpu()
        for name, owed in self.engine.residuals().items():
            self.allowance[name] += 2.0**-24 * (12 + self.engine.world) * _largest(owed)

    def step(self, round: int, scale: float = 1.0) -> None:
        """Run a round that is applied, and add it."""
        self.expect(round)
        self.deliver(self.engine.step(gradients_of(self.engine.rank, round, self.engine.shapes), scale))

    def imbalance(self) -> float:
        """Return the largest difference between input and output plus residual, as a fraction of what is allowed."""
        return self.worst()[0]

    def worst(self) -> tuple[float, str]:
        """Return :meth:`imbalance` and the parameter that has it. A collective."""
        worst = 0.0, ""
        for name, owed in self.engine.residuals().items():
            total = owed.to(self.engine.device)  # NCCL sums nothing on the CPU
            dist.all_reduce(total, group=self.engine.ddp.process_group)
            difference = (self.delivered[name] + total.cpu() - self.expected[name]).abs()
            excess = difference / self.allowance[name].clamp_min(1e-300)
            worst = max(worst, (float(excess.nan_to_num(torch.inf).max()) if excess.numel() else 0.0, name))
        return worst

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.engine.shapes.items()}


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
