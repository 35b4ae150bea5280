"""`commopt probe`: what is timed, what it comes to, and what `auto` would make of it."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.cli import main
from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Evidence, Link
from lightning_commopt.tuning import sweep as sweep_module
from lightning_commopt.tuning.outlook import outlook
from lightning_commopt.tuning.sweep import OPERATIONS, Speed, sweep
from tests.pool import WorkerPool

CPU = torch.device("cpu")


def swept(sizes: list[int]) -> list[Speed]:
    group = dist.group.WORLD
    assert group is not None
    return sweep(ControlGroup(), group, CPU, sizes)


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_is_timed_at_every_size(pool: WorkerPool, world: int) -> None:
    everyone = pool.run(swept, world, [100, 5000])
    assert all(speeds == everyone[0] for speeds in everyone)
    assert [speed.operation for speed in everyone[0]] == [name for name in OPERATIONS for _ in range(2)]
    factors = {"all_reduce": 2 * (world - 1) / world, "send_receive": 1.0}
    for speed in everyone[0]:
        assert speed.nbytes in ((96, 5000 // (4 * world) * 4 * world))
        assert speed.algbw_gb_per_s == pytest.approx(speed.nbytes / speed.us / 1e3)
        factor = factors.get(speed.operation, (world - 1) / world)
        assert speed.busbw_gb_per_s == pytest.approx(factor * speed.algbw_gb_per_s)


def test_sizes_that_come_to_the_same_message_are_sent_once(pool: WorkerPool) -> None:
    speeds = pool.run(swept, 2, [5, 7, 9, 16])[0]
    assert [(speed.operation, speed.nbytes) for speed in speeds] == [(name, n) for name in OPERATIONS for n in (8, 16)]


def each_operation_exchanges() -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    for name, operation in OPERATIONS.items():
        filled: list[torch.Tensor] = []

        def zeros(numel: int, device: torch.device, filled: list[torch.Tensor] = filled) -> torch.Tensor:
            filled.append(torch.full((numel,), float(rank + 1)))
            return filled[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep_module.torch, "zeros", zeros)
            run = operation.prepared(group, CPU, 2 * world)
        run()
        total = float(world * (world + 1) // 2)
        sent, last = filled[0], filled[-1]
        if name == "all_reduce":
            assert sent.tolist() == [total] * 2 * world
        elif name == "all_gather":
            assert last.tolist() == [float(r + 1) for r in range(world) for _ in range(2)]
        elif name == "reduce_scatter":
            assert sent.tolist() == [total] * 2
        else:
            assert last.tolist() == [float((rank - 1) % world + 1)] * 2 * world


def test_each_operation_does_what_it_is_called(pool: WorkerPool) -> None:
    pool.run(each_operation_exchanges, 3)


def slow_operation() -> list[Speed]:
    slow = replace(OPERATIONS["all_reduce"], prepared=lambda *_: lambda: time.sleep(0.01))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "OPERATIONS", {"slow": slow})
        patch.setattr(sweep_module, "_ENOUGH_S", 0.005)
        return swept([8, 16])


def test_time_is_that_of_one_and_an_operation_ends_where_it_takes_long(pool: WorkerPool) -> None:
    (speed,) = pool.run(slow_operation, 2)[0]
    assert speed.us >= 1e4


def evidence(bytes_per_second: float) -> Evidence:
    channel = Channel(bytes_per_second, 0.05)
    codecs = {word: CodecCost(0.5, 0.5, 0.5, 50.0) for word in ("none", "bf16", "int8", "int4")}
    profile = ComputeProfile(0.0, 0.0, 0.0)
    return Evidence(profile, Link(2, channel, channel), [1 << 19] * 8, (1.0, 4.0), 25.0, codecs)


def test_the_longer_a_model_computes_the_milder_the_choice() -> None:
    found = outlook(evidence(12.5e6))
    order = ["int4", "int8", "bf16", "none"]
    methods = [one.method for one in found]
    assert methods == sorted(methods, key=order.index)
    assert methods[0] == "int4"
    assert methods[-1] == "none"
    assert len(methods) >= 3
    assert [one.to_ms for one in found] == [*(one.from_ms for one in found[1:]), None]
    assert found[0].dense_ms > 3 * found[0].step_ms
    for one in found[:-1]:
        assert one.to_ms is not None
        (within,) = outlook(evidence(12.5e6), (one.from_ms + one.to_ms) / 2)
        assert within.method == one.method


@pytest.mark.parametrize("bytes_per_s", [1.25e6, 12.5e6, 125e6])
def test_no_change_is_passed_over(bytes_per_s: float) -> None:
    given = evidence(bytes_per_s)
    found = outlook(given)
    for one in found:
        end = one.to_ms or 10 * one.from_ms
        a_step_before = max(one.from_ms, end * 10 ** (-1 / 40))
        for step_ms in (one.from_ms, (one.from_ms + a_step_before) / 2, a_step_before):
            assert [chosen.method for chosen in outlook(given, step_ms)] == [one.method]
        if one.to_ms is not None:
            assert outlook(given, one.to_ms)[0].method != one.method


def test_nothing_is_won_on_a_fast_link() -> None:
    assert [one.method for one in outlook(evidence(1e12))][-1] == "none"
    assert [one.method for one in outlook(evidence(1e12), 100.0)] == ["none"]


def test_the_command_starts_its_own_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    assert main(["probe", "--smallest=64B", "--largest=64B", "--params=600k", "--step-ms=5000", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    (place,) = answer["places"]
    assert (place["name"], place["ranks"], len(place["speeds"])) == ("all ranks", 2, 4)
    assert answer["link"]["world"] == 2
    assert answer["link"]["route"]["bytes_per_second"] > 0
    assert answer["parameters"] == 600_000
    assert answer["auto"][0]["from_ms"] == 5000
    assert answer["auto"][0]["method"] == "none"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes=1"], "1 process has nobody to talk to"),
        (["--smallest=1MB", "--largest=1kB"], "`--largest` not below it"),
        (["--largest=12"], "`--largest` not below it"),
        (["--largest=3parsec"], "`3parsec` is not a size"),
        (["--step-ms=3"], "needs `--params`"),
        (["--params=0"], "`--params 0` must be at least 1 and at most 1e+12"),
        (["--params=1e30"], "`--params 1e30` must be at least 1 and at most 1e+12"),
        (["--largest=1e31B"], "`--largest` must be at most 100 GB"),
        (["--params=1.5"], "`1.5` is not a count"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    assert main(["probe", *words]) == 2
    assert said in capsys.readouterr().err


def test_half_a_launcher_is_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setenv("RANK", "0")
    assert main(["probe"]) == 2
    assert "`RANK` is set and `WORLD_SIZE` is not: start every rank by torchrun" in capsys.readouterr().err
