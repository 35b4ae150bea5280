"""A pipeline trains as a single process does, whatever its schedule, shape and model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_commopt.pipeline import precision, staged
from tests.pipeline.toy import Chain, Outcome, TinyGPT, alone, batches, distance, piped, tokens
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt_pipeline", "equal to one process")

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]
GRIDS = [
    *((world, world, schedule) for world in (2, 4) for schedule in SCHEDULES),
    *((4, 2, schedule) for schedule in ("1f1b", "zbv")),
]
"""Processes, stages, schedule."""

TOLERANCE = 1e-6

Model = Callable[[], pl.LightningModule]
chain, gpt = Chain, partial(TinyGPT, optimizer="sgd")


def reference(model: Model, data: Any, replicas: int, **options: Any) -> Any:
    """The weights that one process gets from the batches of all replicas."""
    return alone(model(), [data(replica=replica) for replica in range(replicas)], **options)


def check(outcomes: list[Outcome], expected: Any) -> None:
    """Every rank has the whole model, with the right weights."""
    for outcome in outcomes:
        assert distance(outcome.parameters, expected) < TOLERANCE


@pytest.mark.parametrize(("world", "stages", "schedule"), GRIDS)
def test_schedules(pool: WorkerPool, world: int, stages: int, schedule: str) -> None:
    options = {"stages": stages, "microbatches": 4, "schedule": schedule}
    outcomes = pool.run(piped, world, chain, batches, options)
    check(outcomes, reference(chain, batches, world // stages))
    assert all(outcome.losses == outcomes[rank % stages].losses for rank, outcome in enumerate(outcomes[:stages]))


@pytest.mark.parametrize(("world", "stages", "schedule"), [(2, 2, "1f1b"), (2, 2, "zbv"), (4, 2, "1f1b")])
def test_tied_weights_loose_parameters_and_masks(pool: WorkerPool, world: int, stages: int, schedule: str) -> None:
    outcomes = pool.run(piped, world, gpt, tokens, {"stages": stages, "microbatches": 3, "schedule": schedule})
    check(outcomes, reference(gpt, tokens, world // stages))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("rows", "microbatches", "loss", "accumulated"),
    [(8, 4, "mean", 1), (7, 4, "mean", 2), (7, 4, "sum", 1), (8, 1, "sum", 2), (3, 4, "mean", 1)],
)
def test_case_16(pool: WorkerPool, schedule: str, rows: int, microbatches: int, loss: str, accumulated: int) -> None:
    model, data = partial(Chain, loss=loss), partial(batches, rows=rows)
    options = {"microbatches": microbatches, "schedule": schedule, "loss": loss}
    outcomes = pool.run(piped, 2, model, data, options, accumulate_grad_batches=accumulated)
    expected = reference(model, data, 1, accumulate=accumulated)
    check(outcomes, expected)
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        assert outcome.metrics["loss_step"] == pytest.approx(outcome.losses[-1] * accumulated)


@pytest.mark.parametrize(
    ("frozen", "options"), [(3, {}), (4, {}), (4, {"gradient_clip_val": 0.05}), (6, {"accumulate_grad_batches": 2})]
)
def test_frozen_blocks(pool: WorkerPool, frozen: int, options: dict[str, Any]) -> None:
    model = partial(Chain, frozen=frozen)
    outcomes = pool.run(piped, 2, model, batches, {"microbatches": 4}, **options)
    clip, accumulate = options.get("gradient_clip_val", 0.0), options.get("accumulate_grad_batches", 1)
    check(outcomes, reference(model, batches, 1, clip=clip, accumulate=accumulate))


def test_norm_of_all_stages(pool: WorkerPool) -> None:
    outcomes = pool.run(piped, 2, gpt, tokens, {"microbatches": 4}, gradient_clip_val=0.5)
    check(outcomes, reference(gpt, tokens, 1, clip=0.5))


def test_clipping_by_value(pool: WorkerPool) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    outcomes = pool.run(piped, 2, gpt, tokens, {"microbatches": 4}, **options)
    check(outcomes, reference(gpt, tokens, 1, clip_value=0.02))


class Rounded(Chain):
    """Rounds what goes from block 3 to block 4, and its gradient."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x.bfloat16().float() if index == 4 else x)
        return x


@pytest.mark.parametrize(("schedule", "cuts"), [("1f1b", [4]), ("zbv", [2, 4, 6])])
def test_bf16_between_ranks(pool: WorkerPool, schedule: str, cuts: list[int]) -> None:
    """What stays on a rank is not rounded; ZB-V has stages 1 and 2 on one."""
    options = {"microbatches": 4, "schedule": schedule, "cuts": cuts, "activations": "bf16"}
    outcomes = pool.run(piped, 2, Chain, batches, options)
    rounded, exact = (distance(outcomes[0].parameters, reference(model, batches, 1)) for model in (Rounded, Chain))
    assert 10 * TOLERANCE < exact < 0.02
    assert rounded < 0.2 * exact or schedule == "zbv"


def no_shared_sum() -> Outcome:
    """Stages do not add their gradients of shared parameters."""
    summed, staged.dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: None
    try:
        return piped(gpt, tokens, {"microbatches": 4})
    finally:
        staged.dist.all_reduce = summed


def clipped_by_stage() -> Outcome:
    """Each stage clips by its own norm."""
    precision.StagedPrecision._clip_by_norm = lambda self, optimizer, value: (  # type: ignore[method-assign,assignment]
        precision.torch.nn.utils.clip_grad_norm_(self._plugin.main_params(optimizer), value)
    )
    return piped(gpt, tokens, {"microbatches": 4}, gradient_clip_val=0.5)


@pytest.mark.parametrize(("wrong", "clip"), [(no_shared_sum, 0.0), (clipped_by_stage, 0.5)])
def test_differences_are_noticed(pool: WorkerPool, wrong: Callable[[], Outcome], clip: float) -> None:
    outcomes = pool.run(wrong, 2)
    assert max(distance(o.parameters, reference(gpt, tokens, 1, clip=clip)) for o in outcomes) > 100 * TOLERANCE
