"""Ranks that share a model: as many batches on all of them, in evaluation too, or none; and nobody waits."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from tests.pipeline.toy import Chain
from tests.pipeline.toy import batches as classified
from tests.pool import WorkerPool, trainer
from tests.strategies.sharded_toy import sharded
from tests.strategies.toy import Regression, batches
from tests.strategies.zero_toy import ZeroFit, zero_fit, zero_strategy
from tests.uneven.toy import error_of, train_loader

WHERE = ("validation", "test", "predict", "fit")
HSDP = pytest.mark.runs("commopt_hsdp", "uneven data")
ZERO = (
    pytest.mark.runs("commopt_deepspeed", "uneven data"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
)
PIPELINE = pytest.mark.runs("commopt_pipeline", "uneven data")
TWO_BY_TWO: dict[str, Any] = {"nodes": 2, "timeout": 60.0}


class Piped(Chain):
    """A chain that is evaluated."""

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self(batch[0])

    test_step = predict_step = validation_step


class Count(pl.Callback):
    """Counts evaluated batches."""

    def __init__(self) -> None:
        self.batches = 0

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += not trainer.sanity_checking

    @override
    def on_test_batch_end(self, *_: Any) -> None:
        self.batches += 1

    @override
    def on_predict_batch_end(self, *_: Any) -> None:
        self.batches += 1


def evaluated(strategy: Strategy, where: str, counts: Sequence[int], sized: bool, **options: Any) -> int:
    """How many batches this rank evaluated, of its own number of them."""
    piped = isinstance(strategy, CommOptPipelineStrategy)
    model = Piped() if piped else Regression("sgd")
    data: Any = (classified if piped else batches)(max(counts))
    count = Count()
    options = {"use_distributed_sampler": False, "max_epochs": 1, "callbacks": [count], **options}
    fitter = trainer(dist.get_world_size(), strategy, **options)
    own = train_loader(data[: counts[dist.get_rank()]], sized)
    if where == "fit":
        fitter.fit(model, train_loader(data), own)
    elif where == "predict":
        fitter.predict(model, own, return_predictions=False)
    else:
        getattr(fitter, {"validation": "validate"}.get(where, where))(model, own, verbose=False)
    return count.batches


def strategy_of(kind: str, policy: str) -> Strategy:
    """Sharded in groups, or by ZeRO, or in a pipeline."""
    if kind == "hsdp":
        return sharded("none", hierarchy=2, uneven=policy)
    if kind == "zero":
        return zero_strategy(3, uneven=policy)
    return CommOptPipelineStrategy(stages=2, uneven=policy)


def everywhere(
    run: Callable[..., Any], kind: str, policy: str, counts: Sequence[int], wheres: Sequence[str]
) -> dict[tuple[str, bool], Any]:
    """What happens in each place, with a length and without."""
    nodes = {"num_nodes": 2} if kind == "hsdp" else {}
    return {
        (where, sized): run(strategy_of(kind, policy), where, counts, sized, **nodes)
        for where in wheres
        for sized in (True, False)
    }


CASES = [
    pytest.param("hsdp", (2, 3, 3, 2), WHERE, TWO_BY_TWO, marks=HSDP),
    pytest.param("zero", (3, 2), ("validation", "fit"), {"timeout": 90.0}, marks=ZERO),
    pytest.param("pipeline", (2, 3), ("test", "fit"), {"timeout": 60.0}, marks=PIPELINE),
]


@pytest.mark.parametrize(("kind", "counts", "wheres", "options"), CASES)
def test_uneven_evaluation_is_refused(
    pool: WorkerPool, kind: str, counts: tuple[int, ...], wheres: tuple[str, ...], options: dict[str, Any]
) -> None:
    run = partial(error_of, evaluated)
    for rank, texts in enumerate(pool.run(everywhere, len(counts), run, kind, "error", counts, wheres, **options)):
        together = range(rank // 2 * 2, rank // 2 * 2 + 2)
        ended = [other for other in together if counts[other] == 2]
        for (where, sized), text in texts.items():
            stage = "validation" if where == "fit" else where
            if sized:
                told = f"ValueError: Ranks have different numbers of {stage} batches, by rank: {[[n] for n in counts]}."
            else:
                told = f"ValueError: The {stage} batches of rank(s) {ended} end after 2, other ranks have"
            assert told in text
            assert "choose `uneven='trim'` (every rank stops after the shortest)." in text


@pytest.mark.parametrize(("kind", "counts", "wheres", "options"), CASES)
def test_uneven_evaluation_is_trimmed(
    pool: WorkerPool, kind: str, counts: tuple[int, ...], wheres: tuple[str, ...], options: dict[str, Any]
) -> None:
    for ran in pool.run(everywhere, len(counts), evaluated, kind, "trim", counts, wheres[-2:], **options):
        assert set(ran.values()) == {2}


def empty(policy: str) -> list[str]:
    """One rank of each node has nothing to evaluate."""
    counts = (2, 0, 2, 0)
    return [
        error_of(evaluated, strategy_of("hsdp", policy), "test", counts, sized, num_nodes=2) for sized in (True, False)
    ]


@HSDP
@pytest.mark.parametrize("policy", ["error", "trim"])
def test_a_rank_without_batches_is_named(pool: WorkerPool, policy: str) -> None:
    for rank, (sized, unsized) in enumerate(pool.run(empty, 4, policy, **TWO_BY_TWO)):
        assert "Rank(s) [1, 3] have no test batch, while other ranks have" in sized
        assert f"Rank(s) [{rank // 2 * 2 + 1}] have no test batch, while other ranks have" in unsized


@pytest.mark.parametrize("kind", [pytest.param("hsdp", marks=HSDP), pytest.param("pipeline", marks=PIPELINE)])
def test_replicas_may_evaluate_different_numbers(pool: WorkerPool, kind: str) -> None:
    options = TWO_BY_TWO if kind == "hsdp" else {"timeout": 60.0}
    ranks = pool.run(everywhere, 4, evaluated, kind, "error", (2, 2, 3, 3), ("predict", "fit"), **options)
    for ran, count in zip(ranks, (2, 2, 3, 3), strict=True):
        assert set(ran.values()) == {count}


def trained_under_zero(stage: int) -> tuple[str, ZeroFit, ZeroFit]:
    """Different numbers of batches, refused and trimmed; and as many on both ranks. The last window is short."""
    data = batches(7)
    mine = data[: (7, 5)[dist.get_rank()]]
    limits: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    refused = error_of(zero_fit, zero_strategy(stage), data=mine, **limits)
    trimmed = zero_fit(zero_strategy(stage, uneven="trim"), data=mine, **limits)
    return refused, trimmed, zero_fit(zero_strategy(stage), data=data[:5], **limits)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=ZERO) for stage in (2, 3)])
def test_training_under_deepspeed_is_refused_or_trimmed(pool: WorkerPool, stage: int) -> None:
    for refused, trimmed, plain in pool.run(trained_under_zero, 2, stage, timeout=90.0):
        assert refused.startswith("ValueError: Ranks have different numbers of training batches, by rank: [7, 5]")
        assert trimmed.steps == plain.steps == 6
        assert torch.equal(trimmed.parameters, plain.parameters)
