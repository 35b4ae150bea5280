"""Every name and launch form gives our strategy with the right options; options survive pickling."""

import pickle
from itertools import product
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_commopt import CommOptPipelineStrategy, CommOptStrategy, Uncompressed
from lightning_commopt.compression import METHODS
from tests.methods import CASES, Case

LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
UNUSED = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}
STEMS = {"commopt": "none"} | {f"commopt_{name}": name for name in METHODS}


def strategy_named(name: str) -> CommOptStrategy:
    """What a Trainer makes of a name."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    strategy = Trainer(strategy=name, **options).strategy
    assert type(strategy) is CommOptStrategy
    return strategy


def test_names_are_those_of_ddp() -> None:
    ours = {name for name in StrategyRegistry.available_strategies() if name.startswith("commopt")}
    pipelines = {f"commopt_pipeline{launch}" for launch in LAUNCHES}
    sharded = {"commopt_hsdp", *(f"commopt_hsdp_{method}" for method in METHODS)}
    deepspeed = {"commopt_deepspeed", *(f"commopt_deepspeed_stage_{stage}" for stage in (1, 2, 3))}
    data_parallel = {"".join(parts) for parts in product(STEMS, LAUNCHES, UNUSED)}
    assert ours == data_parallel | pipelines | sharded | deepspeed
    ddp = {name.removeprefix("ddp") for name in StrategyRegistry.available_strategies() if name.startswith("ddp")}
    assert ddp == {b + c for b, c in product(LAUNCHES, UNUSED)}


@pytest.mark.parametrize("stem", STEMS)
def test_names_give_strategies(stem: str) -> None:
    for launch, unused in product(LAUNCHES, UNUSED):
        strategy = strategy_named(stem + launch + unused)
        assert strategy.compression == METHODS[STEMS[stem]]()
        assert strategy._is_auto == (stem == "commopt")
        assert strategy._start_method == LAUNCHES[launch]
        assert strategy._ddp_kwargs.get("find_unused_parameters", False) == bool(UNUSED[unused])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_pipelines_by_name(launch: str) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    strategy = Trainer(strategy=f"commopt_pipeline{launch}", **options).strategy
    assert type(strategy) is CommOptPipelineStrategy
    assert strategy._start_method == LAUNCHES[launch]
    assert strategy.ranks_per_pipeline == 2
    copy = pickle.loads(pickle.dumps(CommOptPipelineStrategy(2, 6, "zbv", cuts=[3, "a"], compression="int8")))
    assert (copy.stages, copy.microbatches, copy.schedule, copy.cuts) == (2, 6, "zbv", (3, "a"))


@pytest.mark.parametrize("name", ["commopt_int7", "commopt_int8_popen", "commopt_spawn_int8"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"invalid strategy name: `strategy='{name}'`"):
        strategy_named(name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strategies_survive_pickling(case: Case) -> None:
    options: dict[str, Any] = {"hierarchy": case.hierarchy} if case.hierarchy else {}
    if not isinstance(case.method, Uncompressed):
        options |= {"start_step": 3, "nonfinite": "skip"}
    strategy = CommOptStrategy(case.method, bucket_cap_mb=7, true_mean=True, **options)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.compression == case.method
    assert copy.compression is not case.method
    for name in ("hierarchy", "start_step", "nonfinite", "_ddp_kwargs"):
        assert getattr(copy, name) == getattr(strategy, name)
    assert copy._short_window.true_mean
    assert copy._checkpoint.signature == strategy._checkpoint.signature
