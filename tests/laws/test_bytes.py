"""Law 7: bytes promised = bytes sent, exactly, and as the documentation of the method and the route says."""

from math import prod

import pytest

from lightning_commopt.compression import OneBit, PowerSGD
from lightning_commopt.compression.layout import round_up
from lightning_commopt.selftest.engine import SHAPES
from lightning_commopt.selftest.sent import ROUNDS, exchange
from tests.laws import faults
from tests.laws.faults import planted
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


@each_case_and_world()
def test_promised_is_sent(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    for counted in pool.run(exchange, world, case, 1, device):
        assert counted.on_the_wire == counted.sent == counted.promised.total > 0
        buckets = [4 * sum(numel(name) for name in bucket) for bucket in counted.buckets]
        assert counted.dense == ROUNDS * sum(2 * (world - 1) * nbytes // world for nbytes in buckets)


def _payload_depends_on_shapes(case: Case) -> bool:
    return case.method.name == "powersgd" or (isinstance(case.method, OneBit) and case.method.columns)


@each_case_and_world(which=lambda case: not case.hierarchy and not _payload_depends_on_shapes(case))
def test_payload_is_as_documented(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    """`2 (W - 1) / W` of an encoded bucket, padded so that blocks cross no border of a parameter or of an owner."""
    method, owners = case.method, 1 if world == 2 or case.method.summable else world
    for counted in pool.run(exchange, world, case, 0, device):
        payload = exact = 0
        for bucket in counted.buckets:
            inexact = [n for n in bucket if not method.travels_exactly(SHAPES[n])]
            packed = round_up(sum(round_up(numel(n), method.alignment) for n in inexact), method.alignment * owners)
            alone = round_up(sum(numel(n) for n in bucket if n not in inexact), owners)
            payload += 2 * (world - 1) * owners * method.wire_bytes(packed // owners) // world
            exact += 2 * (world - 1) * 4 * alone // world
        assert counted.promised.payload == ROUNDS * payload
        assert counted.promised.exact == ROUNDS * exact
        assert 0 < counted.promised.header <= ROUNDS * 2 * (world - 1) * sum(8 * len(b) + 48 for b in counted.buckets)


def test_low_rank_sends_a_factor_by_turns(pool: WorkerPool, device: str) -> None:
    """`4 r n` or `4 r m` bytes of a matrix; the first of these rounds is an even one."""
    method, world, payload = PowerSGD(rank=3), 3, 0
    by_rank = pool.run(exchange, world, Case(method), 0, device)
    for bucket in by_rank[0].buckets:
        matrices = [SHAPES[n] for n in bucket if not method.travels_exactly(SHAPES[n])]
        rows, columns = sum(s[0] for s in matrices), sum(prod(s[1:]) for s in matrices)
        payload += sum(2 * (world - 1) * (4 * method.rank * side) // world for side in (rows, columns, rows))
    for counted in by_rank:
        assert counted.promised.payload == payload > 0


def test_column_scales_cost_a_byte_a_column(pool: WorkerPool, device: str) -> None:
    """Two ranks send whole buckets, and with them the columns of every matrix of at least 16 rows and columns."""
    with_columns, without = (pool.run(exchange, 2, Case(OneBit(columns=c)), 0, device)[0] for c in (True, False))
    shapes = [(s[0], prod(s[1:])) for s in SHAPES.values() if not OneBit().travels_exactly(s)]
    columns = sum(shape[1] for shape in shapes if min(shape) >= 16)
    assert with_columns.promised.payload - without.promised.payload == ROUNDS * columns > 0


def test_a_message_that_is_not_counted_is_seen(pool: WorkerPool, device: str) -> None:
    for counted in pool.run(planted, 3, faults.uncounted_message, exchange, named_case("int8"), 0, device):
        assert counted.on_the_wire == 2 * counted.sent


def numel(name: str) -> int:
    """Elements of a parameter."""
    return prod(SHAPES[name])
