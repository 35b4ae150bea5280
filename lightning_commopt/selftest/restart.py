"""Law 8 on the gradient path: a restarted path goes on with the same bits."""

import pickle

from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import engine, gradients_of
from lightning_commopt.selftest.ground import Ground

__all__ = ["restart"]

_SAVED, _END = 2, 4  # rounds


def restart(case: Case, ground: Ground) -> list[str]:
    """Say from which round on a path that was saved and restored differs from one that went on."""
    with engine(case, device=ground.device, timeout=ground.timeout) as made:
        for round in range(_SAVED):
            made.step(gradients_of(made.rank, round))
        saved = pickle.dumps(made.save())
        straight = [digest(made.step(gradients_of(made.rank, round))) for round in range(_SAVED, _END)]
        straight.append(digest(made.residuals()))
    with engine(case, device=ground.device, timeout=ground.timeout) as made:
        made.restore(pickle.loads(saved))
        again = [digest(made.step(gradients_of(made.rank, round))) for round in range(_SAVED, _END)]
        again.append(digest(made.residuals()))
    different = [number for number, (a, b) in enumerate(zip(straight, again, strict=True), start=1) if a != b]
    if not different:
        return []
    what = f"round {different[0]}" if different[0] <= _END - _SAVED else "what is owed in the end"
    return [f"{what} has other bits after a restart than without one"]
