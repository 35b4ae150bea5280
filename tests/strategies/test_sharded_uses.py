"""What users do with modules and optimizers that sharding must not get wrong: shared calls, toggles, old references."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptStrategy, TopK
from tests.pool import WorkerFailure, WorkerPool
from tests.strategies.sharded_toy import Idle, ShardedFit, fit_sharded, sharded
from tests.strategies.toy import Batch, Regression, batches, distance

pytestmark = pytest.mark.runs("commopt_hsdp", "training, methods")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}
UNUSED_TOO = "ddp_find_unused_parameters_true"


def beside_ddp(model: type[Regression], ddp: str, methods: Sequence[str], **options: Any) -> list[ShardedFit]:
    """A short fit under DDP, and under each method."""
    strategies: list[str | Strategy] = [ddp, *(sharded(method, **options) for method in methods)]
    return [fit_sharded(strategy, model("sgd"), batches(6)) for strategy in strategies]


class Siamese(Regression):
    """Calls its last layer twice."""

    @override
    def loss(self, batch: Batch) -> Tensor:
        hidden = self.layers[:-1](batch[0])
        near: Tensor = self.layers[-1](hidden) - batch[1]
        far: Tensor = self.layers[-1](hidden.flip(0))
        return near.square().mean() + far.square().mean()


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
    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        generator, critic = self.optimizers()
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


class IdleButOnOneRank(Idle):
    """The layer is used by rank 3, which no rank with the first shard is."""

    rank = 3


class IdleForWindows(Idle):
    """The layer is used in one of four batches."""

    every = 4


class IdleByHand(IdleButOnOneRank):
    """Two backwards make one gradient, and the layer is used in the first of them alone, if at all."""

    every = 4

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for part in (slice(0, 4), slice(4, 8)):
            loss = self.loss((batch[0][part], batch[1][part]))
            self.losses.append(loss.item())
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def idle(
    model: type[Idle], kind: str, methods: Sequence[Any], options: dict[str, Any], limits: dict[str, Any]
) -> list[ShardedFit]:
    """Fits under DDP, and under each method."""
    strategies: list[str | Strategy] = [UNUSED_TOO, *(sharded(method, **options) for method in methods)]
    return [fit_sharded(strategy, model(kind), batches(12), **limits) for strategy in strategies]


@pytest.mark.parametrize(
    ("model", "kind", "methods", "options", "limits"),
    [
        pytest.param(Idle, "sgd", ("none", "int8"), {}, {}, id="on all ranks"),
        pytest.param(Idle, "adamw", ("none", "int8"), {}, {}, id="under AdamW"),
        pytest.param(IdleButOnOneRank, "sgd", ("none", "int8"), {"wrap": 10**6}, {}, id="but on one rank"),
        pytest.param(
            IdleForWindows, "sgd", ("none", "int8"), {}, {"accumulate_grad_batches": 2}, id="for whole windows"
        ),
        pytest.param(IdleByHand, "sgd", ("none", "int8"), {"wrap": 10**6}, {}, id="by hand"),
        pytest.param(
            Idle, "adamw", ("none",), {"hierarchy": 4, "shard_scatter": "int8"}, {}, id="one replica, encoded"
        ),
        pytest.param(Idle, "sgd", ("int8",), {"shard_scatter": "int8"}, {}, id="encoded twice"),
    ],
)
def test_what_no_rank_uses_stays_as_under_ddp(
    pool: WorkerPool,
    model: type[Idle],
    kind: str,
    methods: tuple[str, ...],
    options: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    ranks = pool.run(idle, 4, model, kind, methods, options, limits, **NODES)
    expected = ranks[0][0].parameters
    exact = not options.get("shard_scatter")
    for place, method in enumerate(methods, 1):
        bound = 1e-6 if method == "none" and exact else 0.01
        assert distance(ranks[0][place].parameters, expected) < bound
        assert all(torch.equal(rank[place].parameters, ranks[0][place].parameters) for rank in ranks)


class IdleOften(Idle):
    """The layer is used in one of five batches; there may be none that is never used."""

    every = 5

    def __init__(self, optimizer: str, never: bool) -> None:
        super().__init__(optimizer)
        if not never:
            del self.never


class Thawed(Idle):
    """The layer that is used now and then begins to be trained at a batch that does not use it."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.sometimes.requires_grad_(False)

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.sometimes.requires_grad_(batch_idx >= 3)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


def thawed() -> list[ShardedFit]:
    strategies = [CommOptStrategy("none", find_unused_parameters=True), sharded("none"), sharded("int8")]
    return [fit_sharded(strategy, Thawed("sgd"), batches(8)) for strategy in strategies]


def test_what_begins_to_be_trained_need_not_be_used_at_once(pool: WorkerPool) -> None:
    expected, none, int8 = pool.run(thawed, 4, **NODES)[0]
    assert distance(none.parameters, expected.parameters) < 1e-6
    assert distance(int8.parameters, expected.parameters) < 0.01


def residuals_of_idle(never: bool) -> list[float]:
    """The residual of the layer after each step."""
    sizes = []

    class Record(pl.Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            strategy: Any = trainer.strategy
            parts = strategy._path.state()["first"]["sometimes.weight"]
            sizes.append(sum(float(values.norm()) for _, values in parts))

    fit_sharded(sharded(TopK(density=0.1)), IdleOften("sgd", never), batches(6), callbacks=[Record()])
    return sizes


@pytest.mark.parametrize("never", [True, False])
def test_residuals_of_what_no_rank_uses_wait(pool: WorkerPool, never: bool) -> None:
    for first, *idle, again in pool.run(residuals_of_idle, 4, never, **NODES):
        assert len(set(idle)) == 1
        if never:
            assert idle[0] == first
        else:
            assert 0 < idle[0] < first, "until a parameter was left out, nothing was kept to go back to"
        assert again != idle[0]


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
        groups: list[dict[str, Any]] = [{"params": self.decayed, "weight_decay": 0.1}, {"params": rest}]
        return torch.optim.SGD(groups, 0.1)


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


class Penalised(Regression):
    """The loss has weights of before sharding, from a list, from a function, or none at all.

    Args:
        kept: ``"list"``, ``"function"``, ``"count"`` (no reference is left), or ``"norm"`` (old `weight_norm`, which
            refers to parameters until its first forward).
    """

    def __init__(self, kept: str) -> None:
        super().__init__("sgd")
        weights = [p for p in self.parameters() if p.ndim > 1]
        if kept == "list":
            self.penalties = {"all": [(weight, 0.1) for weight in weights]}
        elif kept == "function":
            self.penalty = lambda: sum(weight.square().mean() for weight in weights)
        elif kept == "count":
            self.count = len(weights)
        else:
            torch.nn.utils.weight_norm(self.layers[3])


def old_references(kept: str) -> list[str]:
    return [
        text
        for text in fit_sharded(sharded("none"), Penalised(kept), batches(1)).warnings
        if "as before sharding" in text
    ]


@pytest.mark.parametrize(
    ("kept", "told"),
    [("list", "Something, such as `penalties`,"), ("function", "Something"), ("count", ""), ("norm", "")],
)
def test_references_from_before_sharding_are_told(pool: WorkerPool, kept: str, told: str) -> None:
    texts = pool.run(old_references, 4, kept, **NODES)[0]
    expected = f"{told} still refers to `layers.0.weight` and 2 more as before sharding"
    assert [text[: len(expected)] for text in texts] == ([expected] if told else [])


def twice(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two Trainers, one module."""
    model = Regression()
    for options in (first, second):
        precision = options.get("precision", "32-true")
        strategy = sharded("none", **{name: options[name] for name in options.keys() & {"wrap", "hierarchy"}})
        fit_sharded(strategy, model, batches(1), precision=precision)


OTHERWISE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"precision": "bf16-mixed"}, {}, "with precision bf16-mixed, which stays; this one has 32-true"),
    ({}, {"wrap": ["NoSuchClass"]}, r"with `wrap` 2000, which stays; this one has \['NoSuchClass'\]"),
    ({}, {"hierarchy": 4}, "with ranks that share a replica: 2, which stays; this one has 4"),
]


@pytest.mark.parametrize(("first", "second", "told"), OTHERWISE)
def test_a_second_trainer_cannot_shard_otherwise(
    pool: WorkerPool, first: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    with pytest.raises(WorkerFailure, match=f"An earlier Trainer sharded this module {told}"):
        pool.run(twice, 4, first, second, **NODES)


def test_a_second_trainer_may_shard_alike(pool: WorkerPool) -> None:
    pool.run(twice, 4, {"wrap": ["Linear"]}, {"wrap": ["Linear"]}, **NODES)


class Space(Regression):
    """Its layers are in a module that is never called."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        space: Any = nn.Module()
        space.inner, space.outer = nn.Linear(40, 40), nn.Linear(40, 40)
        self.space = space

    @override
    def loss(self, batch: Batch) -> Tensor:
        space: Any = self.space
        inside: Tensor = space.outer(space.inner(batch[0]).tanh())
        return super().loss(batch) + (inside - batch[1]).square().mean()


class Tied(Regression):
    """Uses a weight without a call of its module."""

    @override
    def loss(self, batch: Batch) -> Tensor:
        hidden = self.layers[:-1](batch[0])
        last: Any = self.layers[-1]
        return (F.linear(hidden, last.weight) - batch[1]).square().mean()


def test_a_module_that_is_never_called_is_no_group(pool: WorkerPool) -> None:
    ranks = pool.run(beside_ddp, 4, Space, "ddp", ("none",), wrap=3000, **NODES)
    ddp, ours = ranks[0]
    assert distance(ours.parameters, ddp.parameters) < 1e-6


def test_a_weight_used_without_its_module_is_explained(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="mixed torch.Tensor and DTensor.*Leave that module out of `wrap`"):
        pool.run(beside_ddp, 4, Tied, UNUSED_TOO, ("none",), **NODES)
    ranks = pool.run(beside_ddp, 4, Tied, UNUSED_TOO, ("none",), wrap=10**6, **NODES)
    assert distance(ranks[0][1].parameters, ranks[0][0].parameters) < 1e-6


def gathered_in_halves() -> None:
    fit_sharded(sharded("none", shard_gather="bf16"), Regression(), batches(1), precision="bf16-mixed")


def test_gathering_vectors_alone_in_bf16_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="`shard_gather='bf16'` has no effect, since parameters are gathered in 16"):
        pool.run(gathered_in_halves, 4, **NODES)
