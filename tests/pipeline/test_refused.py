"""What a pipeline cannot do is one error on every rank, before anything is sent."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from lightning_commopt.pipeline.tensor_parallel import TensorParallelPlan
from tests.pipeline.toy import CLASSES, FEATURES, Chain, alone, batches, distance, piped
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt_pipeline", "options refused")

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stages": 0}, "`stages=0` must be an int of at least 1"),
    ({"microbatches": 1.5}, "`microbatches=1.5` must be an int of at least 1"),
    ({"schedule": "2f2b"}, "`schedule='2f2b'` must be one of"),
    ({"stages_per_rank": 3}, "`stages_per_rank=3`: `1f1b` has 1"),
    ({"memory_limit_gb": 0}, "`memory_limit_gb=0` must be a number of GB above 0"),
    ({"activations": "int8"}, "`activations='int8'` must be 'exact' or 'bf16'"),
    ({"tensor_parallel": 0}, "`tensor_parallel=0` must be an int of at least 1"),
    ({"tensor_parallel": 2}, "`tensor_parallel=2` with `plan=None`: .* one of 'gpt2', 'llama'"),
    ({"plan": "gpt2"}, "`tensor_parallel=1` with `plan='gpt2'`"),
    ({"tensor_parallel": 2, "plan": "gpt3"}, "`plan='gpt3'` must be one of 'gpt2', 'llama'"),
    ({"loss": "max"}, "`loss='max'` must be 'mean' or 'sum'"),
    ({"different_batches": "ignore"}, "`different_batches='ignore'` must be one of 'error', 'broadcast'"),
    ({"static_graph": True}, "`static_graph` cannot be combined with a pipeline"),
    ({"hierarchy": 2, "compression": "int8"}, "`hierarchy=2` is not available in a pipeline"),
    ({"uneven": "join"}, "`uneven='join'` is possible under DDP alone: it must be one of 'error', 'trim'"),
    ({"stagse": 2}, "did you mean `stages`"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CommOptPipelineStrategy(**options)


class ByHand(Chain):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Chain):
    """One for each half."""

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(half.parameters(), 0.1) for half in (self.layers[:4], self.layers[4:])]


class SAM(torch.optim.SGD):
    """Looks at the loss twice."""


class WithOptimizer(Chain):
    """Another optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    @override
    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)  # type: ignore[call-arg]


class Twice(torch.optim.SGD):
    """Evaluates the closure again, under a name that says nothing."""

    @override
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Skip(Chain):
    """Adds what the first block made to what the last one gets."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
        result: Tensor = self.layers[-1](x + first)
        return result


class Again(Chain):
    """Calls a block twice."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x))


class Backwards(Chain):
    """Calls blocks in another order than that of their names."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*reversed(self.layers[:-1]), self.layers[-1]):
            x = layer(x)
        return x


class Partly(Chain):
    """Leaves a block out."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[:3], *self.layers[4:]):
            x = layer(x)
        return x


class Checkpointed(Chain):
    """Recomputes every block.

    Args:
        reentrant: In the old way.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    @override
    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Compiled(Chain):
    """A compiled block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].compile()


class NoChain(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).sum()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def different(replica: int = 0) -> Any:
    """Other batches on each rank."""
    return batches(replica=torch.distributed.get_rank())


def no_tensors(replica: int = 0) -> Any:
    """Batches that cannot be cut."""
    return [("a", "b")]


DIVIDED = {"tensor_parallel": 2, "plan": TensorParallelPlan({"layers.7": "column"})}

MODELS: list[tuple[Any, dict[str, Any], str]] = [
    (ByHand, {}, "`automatic_optimization = False`: a pipeline runs.*train with `strategy='commopt'`"),
    (TwoOptimizers, {}, "Training with multiple optimizers is only supported with manual optimization"),
    (partial(WithOptimizer, torch.optim.LBFGS), {}, "`LBFGS` evaluates the loss several times"),
    (partial(WithOptimizer, SAM), {}, "`SAM` evaluates the loss several times"),
    (partial(WithOptimizer, Twice), {}, "evaluated the loss a second time in one step"),
    (
        Skip,
        {"cuts": [4]},
        "no cut before block `layers.4`: what block `layers.0` makes is used after the.*Cut elsewhere",
    ),
    (Skip, {"schedule": "zbv"}, "between the 8 blocks there are only 1 places for one: what block `layers.0` makes"),
    (Again, {}, "Block `layers.0` was called twice.*Name others with `blocks="),
    (Backwards, {}, "Block `layers.6` was called before block `layers.0`.*Name them in their order"),
    (Partly, {}, "Block `layers.4` was called before block `layers.3`"),
    (partial(Checkpointed, True), {}, "reentrant activation checkpointing.*use_reentrant=False"),
    (Compiled, {}, "`layers.1` is compiled.*leave `torch.compile` out"),
    (partial(Chain, depth=1), {}, "2 stages need as many blocks|no `Sequential` or `ModuleList`"),
    (partial(Chain, depth=3), {"schedule": "zbv"}, "4 stages need as many blocks, and the model has 4|has 3"),
    (NoChain, {}, "no `Sequential` or `ModuleList` of two or more modules"),
    (Chain, {"stages": 3}, "`stages=3` must divide the number of processes, which is 2"),
    (Chain, {"memory_limit_gb": 2e-6}, "No cuts of `8` blocks into `2` parts.*take more `stages`.*`memory_limit_gb`"),
    (Chain, {"memory_limit_gb": 3.5e-6, "cuts": [7]}, r"Stage 0 of `cuts=\[7\]` is not within its limit"),
    (Chain, {"stages": 2, **DIVIDED}, "`stages=2` times `tensor_parallel=2` must divide the number of processes"),
    (Chain, {"stages": 1, **DIVIDED}, "`plan` divides `layers.7`, which is not inside of a block"),
    (partial(Chain, depth=3), {"stages": 1, "tensor_parallel": 2, "plan": "gpt2"}, "fits no module of `Chain`"),
    (Chain, {"cuts": [9]}, "a cut is before one of the blocks 1 to 7, not before 9"),
    (Chain, {"cuts": [2, 4]}, "must be 1 ascending cuts for 2 stages"),
    (Chain, {"blocks": ["layers.0", "layer"]}, "the model has no module `layer`"),
]


def refused(model: Any, data: Any, options: dict[str, Any]) -> str:
    """The message of this rank's own error."""
    try:
        piped(model, data, options)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("model", "options", "message"), MODELS)
def test_models(pool: WorkerPool, model: Any, options: dict[str, Any], message: str) -> None:
    texts = pool.run(refused, 2, model, batches, {"microbatches": 4} | options)
    for text in texts:
        assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (different, r"Rank\(s\) \[1\] loaded another batch than rank 0 of their pipeline.*'broadcast'"),
        (no_tensors, "A batch without a tensor.*cannot be split"),
    ],
)
def test_data(pool: WorkerPool, data: Any, message: str) -> None:
    for text in pool.run(refused, 2, Chain, data, {"microbatches": 4}):
        assert re.search(message, text), text


def test_different_batches_are_those_of_the_first(pool: WorkerPool) -> None:
    options = {"microbatches": 4}
    expected = pool.run(piped, 2, Chain, batches, options)
    outcomes = pool.run(piped, 2, Chain, different, options | {"different_batches": "broadcast"})
    assert [o.losses for o in outcomes] == [o.losses for o in expected]


def test_cuts_avoid_skips(pool: WorkerPool) -> None:
    outcomes = pool.run(piped, 2, Skip, batches, {"microbatches": 4})
    assert distance(outcomes[0].parameters, alone(Skip(), [batches()])) < 1e-6


def test_recomputed_blocks(pool: WorkerPool) -> None:
    expected = pool.run(piped, 2, Chain, batches, {"microbatches": 4})
    outcomes = pool.run(piped, 2, partial(Checkpointed, False), batches, {"microbatches": 4})
    assert outcomes[0].losses == pytest.approx(expected[0].losses)


def test_few_microbatches_are_warned_of(pool: WorkerPool) -> None:
    few, default = (pool.run(piped, 2, Chain, batches, options)[0] for options in ({"microbatches": 2}, {}))
    assert "`microbatches=2` is less than 4 a stage" in few.warnings[0]
    assert "Predicted bubble by microbatches: 2: 3" in few.warnings[0]
    assert default.warnings == []
