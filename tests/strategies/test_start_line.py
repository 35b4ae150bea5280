"""The start line says what is in force and why: on rank 0, once a fit."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptStrategy, Int8
from lightning_commopt.compression import METHODS, kernels
from lightning_commopt.strategies import commopt
from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import (
    Regression,
    ScaledFP32,
    batches,
    compresses,
    each_route,
    fit,
    fresh_loop,
    loader,
    strategy_of,
)


def fit_with(strategy: CommOptStrategy | str, **options: Any) -> str:
    """The line of one fit."""
    return fit(strategy, Regression(), batches(1), **options).explain


def lines_without_compression() -> list[str]:
    """`auto` and `none`."""
    return [fit_with("commopt"), fit_with("commopt_none")]


@pytest.mark.parametrize("world", [1, 2])
def test_none_says_that_ddp_does_the_work(pool: WorkerPool, world: int) -> None:
    ranks = f"{world} rank{'s' * (world > 1)}"
    for auto, none in pool.run(lines_without_compression, world):
        measuring = "auto: measuring; " if world > 1 else ""
        assert auto.startswith(f"commopt: {measuring}method `none` is in force")
        assert none.startswith("commopt: method `none` is in force")
        assert all(f"DDP's own reducer on {ranks}, no hook" in line for line in (auto, none))
    assert pool.output[0].count("no hook.") == 2
    assert "commopt:" not in pool.output.get(1, "")


def line_of_one_process(name: str) -> tuple[str, str]:
    """A method that has nobody to talk to."""
    ran = fit(f"commopt_{name}", Regression(), batches(1))
    return ran.explain, ran.hook


@pytest.mark.parametrize("name", [name for name in METHODS if name != "none"])
def test_one_process_says_that_the_method_is_not_active(pool: WorkerPool, name: str) -> None:
    line, hook = pool.run(line_of_one_process, 1, name)[0]
    assert line == f"commopt: method `{name}` is not active: one process has nothing to exchange."
    assert not hook
    assert line in pool.output[0]


class Wide(Regression):
    """With a matrix of a million elements, so that memory shows in the line."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.layers.append(nn.Linear(40, 2000))
        self.layers.append(nn.Linear(2000, 512))
        self.layers.append(nn.Linear(512, 40))


@dataclass
class Said:
    """The line and what it must agree with."""

    line: str
    repr: str
    memory: int


def line_of(case: Case) -> Said:
    """The line of a method in force, and the memory that was taken."""
    strategy = strategy_of(case)
    line = fit(strategy, Wide(), batches(2)).explain
    return Said(line, repr(case.method), strategy.comm_stats().memory_bytes)


@each_route(compresses)
def test_method_says_how_it_travels(pool: WorkerPool, case: Case, world: int) -> None:
    for said in pool.run(line_of, world, case):
        assert f"method `{said.repr}` is in force on {world} ranks, from the first step; " in said.line
        route = "all-reduce" if case.method.summable else "two-hop" if world == 3 else "one-phase all-gather"
        if case.hierarchy:
            nodes = world // case.hierarchy
            assert f"hierarchical: full precision inside {nodes} nodes of {case.hierarchy} ranks, route" in said.line
        assert route in said.line
        assert f"non-finite gradients: {'error' if case.lossy else 'propagate'}; " in said.line
        promised = 1e6 * float(said.line.split("extra memory about ")[1].split(" MB a rank.")[0])
        assert 0.5 * said.memory < promised < 2 * said.memory
    assert pool.output[0].count("is in force") == 1
    assert "is in force" not in pool.output[1]


def lines_of_options() -> dict[str, str]:
    """What options change in the line."""
    int8 = Case(Int8())
    return {
        "dense": fit_with(strategy_of(int8, start_step=3)),
        "skip": fit_with(strategy_of(int8, nonfinite="skip")),
        "scaler": fit_with(strategy_of(int8), plugins=[ScaledFP32(8.0)]),
    }


def test_options_show_in_the_line(pool: WorkerPool) -> None:
    for lines in pool.run(lines_of_options, 2):
        assert ", after 3 dense steps; " in lines["dense"]
        assert "non-finite gradients: skip;" in lines["skip"]
        assert "non-finite gradients: the gradient scaler skips the step;" in lines["scaler"]


def lines_of_kernels() -> list[str]:
    """Where numba is installed it is used, unless it is switched off."""
    lines = []
    choices: tuple[kernels.Kernels, ...] = ("numba", "torch")
    for choice in choices:
        kernels.use(choice)
        lines.append(fit_with("commopt_int8"))
    return lines


def test_kernels_show_in_the_line(pool: WorkerPool) -> None:
    pytest.importorskip("numba")
    for numba, plain in pool.run(lines_of_kernels, 2):
        assert "; compiled CPU kernels (numba); " in numba
        assert "; codec in plain torch; " in plain


def line_over_nodes() -> str:
    """`hierarchy="auto"` with the nodes that the launcher names."""
    return fit_with("commopt_int8")


def test_auto_hierarchy_follows_the_launcher(pool: WorkerPool) -> None:
    assert "inside 2 nodes of 2 ranks" in pool.run(line_over_nodes, 4, nodes=2)[0]
    assert "flat since each node has one rank" in pool.run(line_over_nodes, 2, nodes=2)[0]
    assert "two-hop; " in pool.run(line_over_nodes, 4)[0]


def warnings_on_mixed_devices(names: list[str]) -> list[str]:
    """A fit whose ranks run on devices of these names."""
    commopt.device_name = lambda device: names[dist.get_rank()]
    return fit("commopt_int8", Regression(), batches(2)).warnings


def test_mixed_devices_are_named(pool: WorkerPool) -> None:
    said, elsewhere = pool.run(warnings_on_mixed_devices, 2, ["old", "new"])
    assert said == ["Rank 1 runs on new, rank 0 on old: bit-equal replicas are promised on identical devices only."]
    assert elsewhere == []
    assert pool.run(warnings_on_mixed_devices, 2, ["old", "old"]) == [[], []]


def test_before_the_fit() -> None:
    strategy = Trainer(strategy="commopt_int8", accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, CommOptStrategy)
    assert strategy.explain().endswith("will be in force during fit.")


def say_twice() -> None:
    """Two fits of one Trainer, and a validation."""
    fitter = trainer(dist.get_world_size(), strategy_of(replace(Case(Int8()))), max_epochs=1)
    for _ in range(2):
        fitter.fit_loop = fresh_loop(fitter)
        fitter.fit(Regression(), loader(batches(1)))
    fitter.validate(Regression(), loader(batches(1)), verbose=False)
    assert not isinstance(fitter.strategy.model, DistributedDataParallel)


def test_line_comes_once_a_fit(pool: WorkerPool) -> None:
    pool.run(say_twice, 2)
    assert pool.output[0].count("is in force") == 2
