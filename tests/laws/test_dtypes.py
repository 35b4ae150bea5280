"""Parameters of several types in one model: each bucket has one of them, and fp64 travels exactly."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import SHAPES, Engine, engine, gradients_of
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

DTYPES = {
    "wide": torch.float64,
    "long_bias": torch.float64,
    "body": torch.bfloat16,
    "body_bias": torch.bfloat16,
    "head": torch.float16,
    "norm": torch.float16,
}
HALF_UNIT = {torch.float64: 2.0**-50, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def typed(rank: int, round: int) -> dict[str, Tensor]:
    """A rank's gradients, rounded to the types of the parameters."""
    return {name: g.to(DTYPES.get(name, torch.float32)) for name, g in gradients_of(rank, round).items()}


def mixed(case: Case, device: str) -> tuple[list[str], list[str]]:
    """Digests of four results, one of them dense; and the parameters that are out of balance."""
    digests, engine_ = [], engine(case, device=device, dtypes=DTYPES, start_step=1)
    with engine_ as made:
        off = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        size = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for round in range(4):
            results = made.step(typed(made.rank, round))
            digests.append(digest(results))
            for name, result in results.items():
                assert result.dtype == DTYPES.get(name, torch.float32)
                everyone = [typed(rank, round)[name].double() for rank in range(made.world)]
                off[name] += result.double().cpu() - sum(everyone) / made.world
                size[name] += sum(gradient.abs() for gradient in everyone)
        stats = made.path.stats()
        assert stats.promised.total == stats.sent_bytes
        return digests, out_of_balance(made, off, size)


def out_of_balance(made: Engine, off: dict[str, Tensor], size: dict[str, Tensor]) -> list[str]:
    """The parameters whose results, with what is owed, differ from the means by more than their type explains."""
    wrong = []
    for name, owed in made.residuals().items():
        dist.all_reduce(owed)
        half_unit = HALF_UNIT[DTYPES.get(name, torch.float32)]
        exact = made.case.method.travels_exactly(SHAPES[name]) or DTYPES.get(name) == torch.float64
        cast = 0.0 if exact else 3 * (made.case.relative + made.case.absolute)
        largest = float(size[name].max()) if size[name].numel() else 0.0
        if not bool(((off[name] + owed).abs() <= (2 * half_unit + cast) * (largest + 2 * owed.abs().sum())).all()):
            wrong.append(name)
        if exact and owed.any():
            wrong.append(f"{name} owes something")
    return wrong


@each_case_and_world(worlds=(3,))
def test_types_can_be_mixed(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(mixed, world, case, device)
    for digests, wrong in by_rank:
        assert not wrong
        assert digests == by_rank[0][0]
