"""What users do with modules and optimizers that sharding must not get wrong: shared calls, toggles, old references."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from typing_extensions import override

from tests.pool import WorkerFailure, WorkerPool
from tests.strategies.sharded_toy import ShardedFit, fit_sharded, sharded
from tests.strategies.toy import Batch, Regression, batches, distance

pytestmark = pytest.mark.runs("commopt_hsdp", "training, methods")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}
UNUSED_TOO = "ddp_find_unused_parameters_true"


def beside_ddp(model: type[Regression], ddp: str, methods: Sequence[str], **options: Any) -> list[ShardedFit]:
    """A short fit under DDP, and under each method."""
    strategies = [ddp, *(sharded(method, **options) for method in methods)]
    return [fit_sharded(strategy, model("sgd"), batches(6)) for strategy in strategies]


class Siamese(Regression):
    """Calls its last layer twice."""

    @override
    def loss(self, batch: Batch) -> Tensor:
        hidden = self.layers[:-1](batch[0])
        near: Tensor = self.layers[-1](hidden) - batch[1]
        return near.square().mean() + self.layers[-1](hidden.flip(0)).square().mean()


class Late(Regression):
    """Calls a layer from the third batch on."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.late = nn.Linear(40, 60)

    @override
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * self.late(batch[0]).square().mean() if len(self.losses) >= 2 else loss


class Adversarial(Regression):
    """Two optimizers that are toggled, as in Lightning's example of a GAN."""

    detached = False

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 1))

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc,union-attr]
        self.toggle_optimizer(generator)
        made = self.layers(batch[0])
        loss = F.softplus(-self.critic(made)).mean() + (made - batch[1]).square().mean()
        self.descend(generator, loss)
        self.toggle_optimizer(critic)
        made = self.layers(batch[0])
        made = made.detach() if self.detached else made
        self.descend(critic, F.softplus(self.critic(torch.cat([made, -batch[1]]))).mean())

    def descend(self, optimizer: Any, loss: Tensor) -> None:
        """Step an optimizer, and untoggle it."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.layers, self.critic)]


class AdversarialDetached(Adversarial):
    """The critic's loss does not reach the generator."""

    detached = True


@pytest.mark.parametrize(
    ("model", "ddp", "methods", "options"),
    [
        pytest.param(Siamese, "ddp", ("none", "bf16"), {}, id="a layer called twice"),
        pytest.param(Siamese, "ddp", ("none", "int8"), {"wrap": 10**6}, id="called twice, in one group"),
        pytest.param(Late, UNUSED_TOO, ("none", "int8"), {}, id="a layer not used yet"),
        pytest.param(Adversarial, UNUSED_TOO, ("none", "int8"), {"wrap": 10**6}, id="toggled"),
        pytest.param(AdversarialDetached, UNUSED_TOO, ("none", "int8"), {"wrap": 10**6}, id="toggled and detached"),
        pytest.param(Adversarial, UNUSED_TOO, ("none",), {"hierarchy": 4, "wrap": 10**6}, id="toggled, one replica"),
        pytest.param(Adversarial, UNUSED_TOO, ("none",), {}, id="toggled, in groups"),
    ],
)
def test_it_is_as_under_ddp(
    pool: WorkerPool, model: type[Regression], ddp: str, methods: tuple[str, ...], options: dict[str, Any]
) -> None:
    ranks = pool.run(beside_ddp, 4, model, ddp, methods, **NODES, **options)
    expected = ranks[0][0].parameters
    assert distance(ranks[0][1].parameters, expected) < 1e-6
    for place, _ in enumerate(methods, 1):
        assert distance(ranks[0][place].parameters, expected) < 0.01
        assert all(torch.equal(rank[place].parameters, ranks[0][place].parameters) for rank in ranks)


def used_and_unused() -> list[list[str]]:
    fits = [
        fit_sharded(sharded("int8"), model, batches(4), accumulate_grad_batches=every)
        for model, every in ((Regression("sgd"), 1), (Late("sgd"), 1), (Late("sgd"), 4))
    ]
    return [[text for text in fit.warnings if "took no part in a step" in text] for fit in fits]


def test_unused_parameters_are_told_once(pool: WorkerPool) -> None:
    used, unused, used_in_the_window = pool.run(used_and_unused, 4, **NODES)[0]
    assert used == used_in_the_window == []
    assert len(unused) == 1
    assert unused[0].startswith("`late.weight` and 1 more took no part in a step of this rank.")


def test_a_residual_cannot_follow_a_group_that_is_reduced_twice(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"module with `layers.5.weight` ran more than once.*leave the module out"):
        pool.run(beside_ddp, 4, Siamese, "ddp", ("int8",), **NODES)


class Remembering(Regression):
    """Makes lists of its parameters before they are sharded."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.decayed = [p for p in self.parameters() if p.ndim > 1]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        rest = [p for p in self.parameters() if p.ndim == 1]
        return torch.optim.SGD([{"params": self.decayed, "weight_decay": 0.1}, {"params": rest}], 0.1)


def test_an_optimizer_of_parameters_from_before_sharding_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        WorkerFailure, match="`SGD` has 3 parameters that are not, or no longer, those of the Lightning"
    ):
        pool.run(beside_ddp, 4, Remembering, "ddp", ("none",), **NODES)


def averaged() -> None:
    fit_sharded(sharded("none"), Regression(), batches(2), callbacks=[StochasticWeightAveraging(1e-2)])


def test_averages_of_shards_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="`StochasticWeightAveraging` averages whole parameters, and each rank has"):
        pool.run(averaged, 4, **NODES)


def test_each_name_of_wrap_is_in_the_model(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="`wrap`: there is no `LayerNrm` in the model"):
        pool.run(beside_ddp, 4, Regression, "ddp", ("none",), wrap=["Linear", "LayerNrm"], **NODES)
