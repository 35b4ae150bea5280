"""Law 1: what goes into the exchange comes out of it, now or in a later round."""

from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.engine import engine
from lightning_commopt.selftest.ground import Ground
from lightning_commopt.selftest.ledger import Ledger

__all__ = ["conservation"]

_SCALES = (1.0, 1000.0, 3e-3, 1.0)


def conservation(case: Case, ground: Ground) -> list[str]:
    """Say what rounding does not explain after rounds over several buckets, with loss scales that change."""
    with engine(case, device=ground.device, timeout=ground.timeout) as made:
        ledger = Ledger(made)
        for round, scale in enumerate(_SCALES):
            ledger.step(round, scale)
        ratio, name = ledger.worst()
    if ratio <= 1:
        return []
    return [
        f"means and residuals of `{name}` differ from the true means of {len(_SCALES)} rounds by {ratio:.3g} times "
        "what rounding explains"
    ]
