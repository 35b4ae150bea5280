"""Sums of flat buffers, as ZeRO lays them out; DeepSpeed is not needed."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt import BF16, Int4, Int8, OneBit
from lightning_commopt.compression import Compression
from lightning_commopt.zero.exchange import ZeroExchange
from lightning_commopt.zero.held import Held, Reader
from lightning_commopt.zero.scatter import ScatterLayout
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt_deepspeed", "exchange of gradients")

HELD = [Held("a", (7,)), Held("b", (33, 40)), Held("c", (2, 1)), Held("d", (61, 35)), Held("e", (1,))]
CPU = torch.device("cpu")


def gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(one.numel, generator=generator) for one in HELD]


def rows(parts_of: list[Tensor], world: int) -> Tensor:
    """A buffer as stage 3 has it; what pads it is anything, here not a number."""
    buffer = []
    for rank in range(world):
        for values in parts_of:
            size = -(-len(values) // world)
            part = values[rank * size : (rank + 1) * size]
            buffer += [part, torch.full((size - len(part),), torch.nan)]
    return torch.cat(buffer)


def sums(method: Compression, rounds: int, residuals: bool) -> tuple[tuple[Tensor, ...], bool]:
    """The mean over rounds of both kinds of sums, each with the true ones; and whether bytes are as promised."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    exchange = ZeroExchange(method, CPU, residuals=residuals)
    true = [sum(parts[1:], parts[0]) for parts in zip(*(gradients(r) for r in range(world)), strict=True)]
    own_row = rows(true, world).view(world, -1)[rank]
    flat, row = torch.zeros(sum(map(len, true))), torch.zeros(len(own_row))
    for _ in range(rounds):
        whole = torch.cat(gradients(rank))
        exchange.all_reduce(whole, [one.whole(method) for one in HELD], group)
        buffer = rows(gradients(rank), world)
        output = buffer.view(world, -1)[rank]  # DeepSpeed writes into its input
        exchange.reduce_scatter(output, buffer, HELD, group)
        flat, row = flat + whole / rounds, row + output / rounds
    real = ~own_row.isnan()
    stats = exchange.stats(world)
    return (flat, torch.cat(true), row[real], own_row[real]), stats.sent_bytes == stats.promised.total


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize(("method", "bound"), [(BF16(), 0.005), (Int8(), 0.01), (Int4(block=32), 0.15)])
@pytest.mark.parametrize("world", [2, 3])
def test_sum_of_every_element(pool: WorkerPool, method: Compression, bound: float, world: int) -> None:
    by_rank = pool.run(sums, world, method, 1, False)
    for (flat, true, row, true_row), counted in by_rank:
        assert error(flat, true) < bound
        assert error(row, true_row) < bound
        assert torch.equal(flat, by_rank[0][0][0])
        assert torch.equal(flat[:7].isnan(), torch.zeros(7).bool())
        assert torch.allclose(flat[:7], true[:7], rtol=1e-6, atol=1e-6)  # norms and biases travel exactly
        assert counted


@pytest.mark.parametrize("method", [Int4(), OneBit()])
def test_what_a_round_drops_comes_with_the_next_ones(pool: WorkerPool, method: Compression) -> None:
    once, kept, dropped = (pool.run(sums, 3, method, *run)[1][0] for run in ((1, False), (40, True), (40, False)))
    for got, true in ((0, 1), (2, 3)):
        assert error(kept[got], kept[true]) < 0.3 * error(once[got], once[true])
        assert error(dropped[got], dropped[true]) > 0.9 * error(once[got], once[true])


@pytest.mark.parametrize("owners", [2, 3, 4])
def test_a_row_for_each_owner(owners: int) -> None:
    layout = ScatterLayout(HELD, Int8(), owners)
    taken = torch.zeros(layout.numel)
    for segment in layout.segments:
        taken[segment.in_bucket] += 1
    assert taken.max() == 1
    assert int(taken.sum()) == sum(one.numel for one in HELD)
    for owner in range(owners):
        for segment in layout.row(owner):
            chunk = layout.exact_chunk if segment.parameter.exact else layout.chunk
            assert owner * chunk <= segment.packed_offset
            assert segment.packed.stop <= (owner + 1) * chunk
            assert segment.parameter.exact or segment.packed_offset % Int8().alignment == 0


def engine_with(buckets: object) -> SimpleNamespace:
    module = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(**({"ipg_buckets": buckets} if buckets else {})))


def test_reader_names_what_comes_in_several_parts() -> None:
    reader, method = Reader(engine_with(None)), Int8()
    first, second = (reader.stretch(torch.float32, n, method) for n in (30, 24))
    assert [(p.name, p.numel) for p in first] == [("0.weight[0:30]", 30)]
    assert [(p.name, p.numel) for p in second] == [
        ("0.weight[30:40]", 10),
        ("0.bias", 4),
        ("1.weight", 8),
        ("1.bias", 2),
    ]
    assert [p.name for p in reader.stretch(torch.float32, 54, method)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(RuntimeError, match=r"a buffer of 55 elements where its bucket has 54.*`compression='none'`"):
        reader.stretch(torch.float32, 55, method)


def test_reader_follows_the_bucket() -> None:
    engine = engine_with(None)
    bias, weight = engine.module[1].bias, engine.module[1].weight
    engine.optimizer.ipg_buckets = {torch.float32: SimpleNamespace(params=[bias, weight])}
    assert [one.name for one in Reader(engine).whole(torch.float32)] == ["1.bias", "1.weight"]
    engine.optimizer.bit16_groups = [[weight, bias]]
    engine.optimizer.ipg_buckets = {torch.float32: SimpleNamespace(params=[(0, 1, 7)])}
    assert [one.name for one in Reader(engine).whole(torch.bfloat16)] == ["1.bias"]
