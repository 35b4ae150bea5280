"""Law 7: bytes promised = bytes sent, exactly."""

from datetime import timedelta
from typing import NamedTuple

from lightning_commopt.measure import Traffic
from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.engine import engine, gradients_of
from lightning_commopt.selftest.ground import Ground
from lightning_commopt.selftest.wire import counted_bytes

__all__ = ["ROUNDS", "Bytes", "exchange", "sent"]

ROUNDS = 3


class Bytes(NamedTuple):
    """Bytes of some rounds: as counted below the product, as it counted them, as it promised them."""

    on_the_wire: int
    sent: int
    promised: Traffic
    dense: int
    buckets: list[list[str]]


def exchange(case: Case, start_step: int, device: str, timeout: timedelta | None = None) -> Bytes:
    """Count some rounds, each after a backward that does not synchronise."""
    with engine(case, device=device, timeout=timeout, start_step=start_step) as made:
        before = made.path.stats()
        with counted_bytes() as total:
            for round in range(ROUNDS):
                made.accumulate(gradients_of(made.rank, 10 + round))
                made.step(gradients_of(made.rank, round))
        after = made.path.stats() - before
        return Bytes(total[0], after.sent_bytes, after.promised, after.dense_bytes, list(made.buckets))


def sent(case: Case, ground: Ground) -> list[str]:
    """Say how many bytes more or fewer were sent than promised."""
    counted = exchange(case, 1, ground.device, ground.timeout)
    promised = counted.promised.total
    if counted.on_the_wire == counted.sent == promised > 0:
        return []
    return [
        f"{promised} bytes were promised for {ROUNDS} rounds, {counted.sent} counted, {counted.on_the_wire} handed to "
        "the collectives"
    ]
