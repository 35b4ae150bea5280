"""Law 5 on the gradient path: a gradient that is not finite stays where it is, and leaves no trace in what is kept."""

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor

from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import SHAPES, Engine, engine, gradients_of
from lightning_commopt.selftest.ground import Ground
from lightning_commopt.selftest.ledger import Ledger

__all__ = ["after_skipped_steps", "digest_of_state", "finite", "nonfinite", "spoiled"]

BAD = {"body": torch.nan, "conv": torch.inf, "norm": -torch.inf, "scalar": torch.nan, "head": -torch.inf}
"""One bad element in each of these parameters, one a round; some compressed, some exact."""


def nonfinite(case: Case, ground: Ground) -> list[str]:
    """Law 5."""
    return after_skipped_steps(case, ground.device, ground.timeout)


def after_skipped_steps(case: Case, device: str, timeout: timedelta | None = None) -> list[str]:
    """Say what is wrong when every second step is skipped because of a bad gradient."""
    wrong = []
    with engine(case, device=device, timeout=timeout) as made:
        ledger, path = Ledger(made), made.path
        ledger.step(0)
        for round, (name, value) in enumerate(BAD.items(), start=1):
            before = digest_of_state(made)
            found = finite(made.round(spoiled(made, 2 * round, name, value)))
            if found != {other: other != name for other in SHAPES}:
                others = [other for other in SHAPES if found[other] is not (other != name)]
                wrong.append(f"{value} in `{name}` on the last rank: the wrong means are finite, those of {others}")
            if path.nonfinite_parameters() != [name]:
                wrong.append(f"{value} in `{name}`: reported for some rank were {path.nonfinite_parameters()}")
            if path.nonfinite_parameters(here=True) != [name] * (made.rank == made.world - 1):
                wrong.append(f"{value} in `{name}`: reported here were {path.nonfinite_parameters(here=True)}")
            path.step_done(False)
            if digest_of_state(made) != before:
                wrong.append(f"{value} in `{name}`: residuals changed in a step that was skipped")
            ledger.step(2 * round + 1)
        ratio, name = ledger.worst()
        if not ratio <= 1:
            wrong.append(f"`{name}` is out of balance by {ratio:.3g} times what rounding explains after skipped steps")
        if (path.applied_steps, path.skipped_steps) != (1 + len(BAD), len(BAD)):
            wrong.append(f"{path.applied_steps} steps count as applied, not {1 + len(BAD)}")
    return wrong


def spoiled(made: Engine, round: int, name: str, value: float) -> dict[str, Tensor]:
    """Return this rank's gradients, with a bad element on the last rank."""
    gradients = gradients_of(made.rank, round)
    if made.rank == made.world - 1:
        flat = gradients[name].view(-1)
        flat[len(flat) // 2] = value
    return gradients


def finite(results: Mapping[str, Tensor | None]) -> dict[str, bool | None]:
    """Return for each parameter whether its result is finite (True), wholly NaN (False) or in between (None)."""
    found = {}
    for name, result in results.items():
        assert result is not None
        nan = result.isnan()
        found[name] = True if bool(result.isfinite().all()) else False if bool(nan.all()) else None
    return found


def digest_of_state(made: Engine) -> str:
    """Return a digest of all that is kept from step to step, bit by bit."""
    kinds = made.path.state()
    return digest({f"{kind} {n} {i}": t for kind, p in kinds.items() for n, pieces in p.items() for i, t in pieces})
