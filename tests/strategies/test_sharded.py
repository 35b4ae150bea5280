"""Shards inside nodes, compressed exchange between them: the model is that of plain DDP, and little is sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptShardedStrategy, CommOptStrategy, PowerSGD
from lightning_commopt.compression import METHODS
from tests.pool import WorkerFailure, WorkerPool
from tests.strategies.sharded_toy import OwnSharding, ShardedFit, fit_sharded, sharded
from tests.strategies.toy import ByHand, Regression, ScaledFP32, batches, distance

pytestmark = pytest.mark.runs("commopt_hsdp", "training, methods")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}


class Unhooked(pl.Callback):
    """Takes the exchange out, as if it had never been asked for."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy._path.detach()
        strategy._path = None


# ---- parameters -----------------------------------------------------------------------------------------------------


def train(steps: int) -> dict[str, ShardedFit]:
    """One training by plain DDP and by shards, and the beginning of one with no exchange between nodes."""
    data = batches(steps)
    inside = sharded("int8", shard_gather="int8", shard_scatter="int8")
    return {
        "ddp": fit_sharded("ddp", Regression(), data),
        "none": fit_sharded(sharded("none"), Regression(), data),
        "int8": fit_sharded(sharded("int8"), Regression(), data),
        "int8 inside too": fit_sharded(inside, Regression(), data),
        "apart": fit_sharded(sharded("none"), Regression(), data[: steps // 6], callbacks=[Unhooked()]),
    }


@pytest.fixture(scope="module")
def trained(pool: WorkerPool) -> list[dict[str, ShardedFit]]:
    """300 steps on each rank."""
    return pool.run(train, 4, 300, nodes=2, timeout=200.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "limit"), [("none", 1e-4), ("int8", 0.01), ("int8 inside too", 0.01)])
def test_parameters_are_those_of_ddp(trained: list[dict[str, ShardedFit]], method: str, limit: float) -> None:
    ddp = trained[0]["ddp"].parameters
    assert distance(trained[0][method].parameters, ddp) < limit
    assert all(torch.equal(rank[method].parameters, trained[0][method].parameters) for rank in trained)
    apart = [trained[rank]["apart"].parameters for rank in (0, 2)]
    assert distance(*apart) > 0.02, "the limits tell an exchange from none"


@pytest.mark.timeout(240)
def test_bytes_are_counted_between_replicas(trained: list[dict[str, ShardedFit]]) -> None:
    for rank in trained:
        none, int8, inside = (rank[kind].stats for kind in ("none", "int8", "int8 inside too"))
        assert none is not None
        assert int8 is not None
        assert inside is not None
        for stats in (none, int8, inside):
            assert stats.rounds == stats.applied_steps == 300
            assert stats.hook_calls == 4 * 300
            assert stats.sent_bytes == stats.promised.total
        exact = 34 + 34 + 34 + 31 + 20
        half = 34 * 40 + 31 * 67 + 20 * 61 + exact  # a shard has whole rows
        assert none.promised.exact == int8.promised.exact == 300 * 4 * exact
        assert none.promised.payload == 300 * 4 * (34 * 40 + 2080 + 1224)  # and blocks of eight
        assert none.dense_bytes == int8.dense_bytes == 300 * 4 * half
        between = int8.sent_bytes - int8.promised.inside_node
        assert between < 0.35 * int8.dense_bytes
        assert inside.sent_bytes - inside.promised.inside_node == between

        root = 34 + 34  # the norm belongs to the module itself, whose parameters wait for backward
        gathered, reduced = 2 * half - root, half
        assert none.promised.inside_node == int8.promised.inside_node == 300 * 4 * (gathered + reduced)
        assert inside.promised.inside_node < 0.35 * none.promised.inside_node


@pytest.mark.timeout(240)
def test_explain_says_what_is_in_force(trained: list[dict[str, ShardedFit]]) -> None:
    assert trained[0]["int8"].explain.startswith("commopt: FSDP2 over 2 ranks of a node, 4 groups; method `Int8(")
    assert "in force between 2 replicas, from the first step; route one-phase" in trained[0]["int8"].explain


# ---- a step ---------------------------------------------------------------------------------------------------------


def each_method(methods: Sequence[str]) -> dict[str, ShardedFit]:
    chosen = {method: PowerSGD(rank=2) if method == "powersgd" else method for method in methods}
    return {word: fit_sharded(sharded(method), Regression(), batches(6)) for word, method in chosen.items()}


def test_every_method_keeps_replicas_equal(pool: WorkerPool) -> None:
    ranks = pool.run(each_method, 4, tuple(METHODS), **NODES)
    for method in METHODS:
        fits = [rank[method] for rank in ranks]
        assert all(torch.equal(fit.parameters, fits[0].parameters) for fit in fits), method
        assert all(fit.losses[-1] < 1.5 * fit.losses[0] for fit in fits), method
        for fit in fits:
            assert fit.stats is not None
            assert fit.stats.method == method
            assert fit.stats.sent_bytes == fit.stats.promised.total > 0, method


def accumulate(clipped_by: str) -> list[ShardedFit]:
    """Windows of three batches and a last one of one, clipped, validated on the way."""
    options = {"accumulate_grad_batches": 3, "val_check_interval": 4, "gradient_clip_algorithm": clipped_by}
    options["gradient_clip_val"] = 0.05 if clipped_by == "norm" else 5e-4
    data = batches(7)
    strategies: list[str | Strategy] = ["ddp", sharded("none"), sharded("int8", shard_scatter="bf16")]
    models = [Logging() for _ in strategies]
    return [fit_sharded(s, m, data, validation=data[:2], **options) for s, m in zip(strategies, models, strict=True)]


class Logging(Regression):
    """Logs its validation loss, and calls itself in the step as a user would."""

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        predicted: Tensor = self.layers(inputs)
        return predicted

    @override
    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = (self(batch[0]) - batch[1]).square().mean()
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.log("val_loss", loss, sync_dist=True)
        return loss


@pytest.mark.parametrize("clipped_by", ["norm", "value"])
def test_one_exchange_a_window_clipped_as_ddp_does(pool: WorkerPool, clipped_by: str) -> None:
    for ddp, none, int8 in pool.run(accumulate, 4, clipped_by, **NODES):
        assert none.steps == ddp.steps == 3
        torch.testing.assert_close(none.parameters, ddp.parameters, rtol=1e-4, atol=1e-6)
        assert none.metrics["val_loss"] == pytest.approx(ddp.metrics["val_loss"], rel=1e-4)
        assert none.losses == pytest.approx(ddp.losses, rel=1e-4)
        for fit in (none, int8):
            assert fit.stats is not None
            assert fit.stats.rounds == 3
            assert fit.stats.hook_calls == 12
        assert distance(int8.parameters, ddp.parameters) < 0.01


def short_window() -> list[ShardedFit]:
    """A window of three batches and one of two, by a method that sees the size of a gradient."""
    strategies = CommOptStrategy("none", true_mean=True), sharded("none", true_mean=True), sharded("none")
    return [fit_sharded(s, Regression("sgd"), batches(5), accumulate_grad_batches=3) for s in strategies]


def test_a_short_window_has_its_true_mean(pool: WorkerPool) -> None:
    ranks = pool.run(short_window, 4, **NODES)
    for ddp, true_mean, nominal in ranks:
        torch.testing.assert_close(true_mean.parameters, ddp.parameters, rtol=1e-4, atol=1e-6)
        assert distance(nominal.parameters, ddp.parameters) > 1e-4
        assert not any("The last accumulation window" in text for text in true_mean.warnings)
    assert any("The last accumulation window" in text for text in ranks[0][2].warnings)


class TwiceByHand(ByHand):
    """Two backwards a step, the second on what the first optimizer step made of the parameters."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))  # adds to the gradient of the first
        optimizer.step()
        return loss


def by_hand(wrap: int | None) -> list[ShardedFit]:
    data = batches(5)
    strategies = "ddp", sharded("none", wrap=wrap), sharded("int8", wrap=wrap)
    return [fit_sharded(s, TwiceByHand(), data) for s in strategies]


@pytest.mark.parametrize("wrap", [2000, None])
def test_manual_optimisation(pool: WorkerPool, wrap: int | None) -> None:
    for ddp, none, int8 in pool.run(by_hand, 4, wrap, **NODES):
        torch.testing.assert_close(none.parameters, ddp.parameters, rtol=1e-4, atol=1e-6)
        assert distance(int8.parameters, ddp.parameters) < 0.01
        assert int8.stats is not None
        assert int8.stats.applied_steps == 10


class Unfreezing(Regression):
    """Its first layer is frozen until the second epoch; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3, 2))
        self.layers[0].requires_grad_(False)

    @override
    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)


def unfreeze(method: str) -> tuple[ShardedFit, Tensor, Tensor]:
    model = Unfreezing()
    layer: Any = model.layers[0]
    first = layer.weight.detach().clone()
    result = fit_sharded(sharded(method), model, batches(3), max_epochs=2)
    return result, first, layer.weight.full_tensor().detach()


@pytest.mark.parametrize("method", ["none", "int8"])
def test_parameters_may_become_trainable_or_stay_unused(pool: WorkerPool, method: str) -> None:
    ranks = pool.run(unfreeze, 4, method, **NODES)
    for result, before, after in ranks:
        assert not torch.equal(before, after)
        assert torch.equal(result.parameters, ranks[0][0].parameters)


# ---- gradients that are not finite ----------------------------------------------------------------------------------


def spoil(nonfinite: str) -> ShardedFit:
    return fit_sharded(sharded("int8", nonfinite=nonfinite), Regression(spoilt=(3, 1)), batches(4))


def test_all_ranks_end_with_the_name(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"The gradient of `layers\.\d\.(weight|bias)` is not finite on rank"):
        pool.run(spoil, 4, "error", **NODES)


def test_all_ranks_skip(pool: WorkerPool) -> None:
    ranks = pool.run(spoil, 4, "skip", **NODES)
    for fit in ranks:
        assert fit.stats is not None
        assert (fit.stats.applied_steps, fit.stats.skipped_steps) == (3, 1)
        assert fit.parameters.isfinite().all()
        assert torch.equal(fit.parameters, ranks[0].parameters)
    assert any("is not finite: this optimizer step is skipped" in text for text in ranks[0].warnings)


def scale(factor: float | None, spoilt: bool) -> ShardedFit:
    plugins = [] if factor is None else [ScaledFP32(factor)]
    model = OwnSharding(spoilt=(2, 1) if spoilt else None)
    return fit_sharded(sharded("int8", nonfinite="propagate", wrap=None), model, batches(4), plugins=plugins)


def test_a_loss_scale_changes_nothing_and_an_overflow_is_skipped(pool: WorkerPool) -> None:
    plain = pool.run(scale, 4, None, False, **NODES)[0]
    scaled = pool.run(scale, 4, 1024.0, False, **NODES)[0]
    assert torch.equal(plain.parameters, scaled.parameters)
    for fit in pool.run(scale, 4, 1024.0, True, **NODES):
        assert fit.stats is not None
        assert (fit.stats.applied_steps, fit.stats.skipped_steps) == (3, 1)
        assert fit.parameters.isfinite().all()


# ---- how the model is sharded ---------------------------------------------------------------------------------------


def own_sharding(wrong: str, wrap: Any = None) -> list[ShardedFit]:
    return [
        fit_sharded(sharded("int8", wrap=wrap), OwnSharding(wrong), batches(4)),
        fit_sharded(sharded("int8"), Regression(), batches(4)),
    ]


def test_a_model_may_shard_itself(pool: WorkerPool) -> None:
    for own, ours in pool.run(own_sharding, 4, "", **NODES):
        torch.testing.assert_close(own.parameters, ours.parameters, rtol=1e-4, atol=1e-6)
        assert own.groups == [["layers.0.weight", "layers.0.bias"]] + own.groups[1:]


@pytest.mark.parametrize(
    ("wrong", "wrap", "message"),
    [
        ("mesh", None, r"sharded over another mesh: use `mesh=self.device_mesh\['shard'\]`"),
        ("parameter", None, "`layers.5.weight` belongs to no module that was sharded"),
        ("fp16", None, r"reduced in torch.float16.*MixedPrecisionPolicy\(reduce_dtype=torch.float32\)"),
        ("", 100, "`wrap` has no effect, since `configure_model` shards the module"),
    ],
)
def test_a_sharding_that_is_not_exchanged_is_refused(pool: WorkerPool, wrong: str, wrap: Any, message: str) -> None:
    with pytest.raises(WorkerFailure, match=message):
        pool.run(own_sharding, 4, wrong, wrap, **NODES)


def wrapped(wrap: Any) -> list[list[str]]:
    return fit_sharded(sharded("none", wrap=wrap), Regression(), batches(1), num_nodes=1).groups


@pytest.mark.parametrize(
    ("wrap", "groups"),
    [
        (["Linear"], 4),
        ([torch.nn.Linear, "LayerNorm"], 4),
        (3000, 2),
        (None, 1),
    ],
)
def test_wrap_makes_groups(pool: WorkerPool, wrap: Any, groups: int) -> None:
    found = pool.run(wrapped, 2, wrap)[0]
    assert len(found) == groups
    assert sorted(name for group in found for name in group) == sorted(n for n, _ in Regression().named_parameters())


def test_wrap_that_selects_nothing_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="`wrap`: there is no `Block` in the model"):
        pool.run(wrapped, 2, ["Block"])


def half(precision: str) -> tuple[ShardedFit, list[Any]]:
    strategy = sharded("int8", shard_gather="int8", shard_scatter="int8", nonfinite="propagate")
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if precision == "16-mixed" else []
    options: dict[str, Any] = {"plugins": plugins} if plugins else {"precision": precision}
    result = fit_sharded(strategy, Regression(), halves(precision), enable_model_summary=True, **options)
    assert strategy._shards is not None
    return result, [(g.managed.mp_policy.param_dtype, g.managed.mp_policy.reduce_dtype) for g in strategy._shards]


def halves(precision: str) -> list[Any]:
    """Batches in the type that the model wants."""
    return [tuple(t.bfloat16() if precision == "bf16-true" else t for t in batch) for batch in batches(3)]


@pytest.mark.parametrize(
    ("precision", "gathered"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16), ("bf16-true", None)]
)
def test_precision_is_that_of_the_trainer(pool: WorkerPool, precision: str, gathered: torch.dtype | None) -> None:
    ranks = pool.run(half, 4, precision, **NODES)
    for fit, policies in ranks:
        assert torch.equal(fit.parameters, ranks[0][0].parameters)
        assert fit.losses[-1] < 1.2 * fit.losses[0]
        assert policies == [(None, torch.float32)] + [(gathered, torch.float32)] * 3


# ---- what is refused ------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"compression": "auto"}, "`compression='auto'` measures DDP only: choose a method"),
    ({"compression": "int7"}, "`compression='int7'` is not a method"),
    ({"sync": "diloco"}, "`sync='diloco'`: replicas of a sharded model meet at every step. Leave `sync` out"),
    ({"hierarchy": False}, "`hierarchy=False`: shards stay inside nodes.*or `CommOptStrategy`"),
    ({"hierarchy": 1}, "`hierarchy=1` must be 'auto', or the number of ranks that share a replica"),
    ({"start_step": -1}, "`start_step=-1`: `start_step` must be >= 0"),
    ({"compression": "none", "start_step": 2}, "`start_step=2` has no meaning for method `none`"),
    ({"nonfinite": "ignore"}, "`nonfinite='ignore'` must be one of 'propagate', 'error', 'skip'"),
    ({"uneven": "join"}, "`uneven='join'` is possible under DDP alone: it must be one of 'error', 'trim'"),
    ({"uneven": "all"}, "`uneven='all'` must be one of 'error', 'trim'"),
    ({"compression": "none", "residuals": "mean"}, "`residuals='mean'` has no meaning for method `none`, which keeps"),
    (
        {"save_distributed_checkpoint": "no"},
        "`save_distributed_checkpoint='no'`: `save_distributed_checkpoint` must be",
    ),
    ({"timeout": 5}, "`timeout=5` must be a `timedelta`"),
    ({"residuals": "all"}, "`residuals='all'` must be one of"),
    ({"stall_timeout": 0}, "`stall_timeout=0` must be at least one second"),
    ({"wrap": 0}, "`wrap=0`: a group must have at least one parameter"),
    ({"wrap": []}, r"`wrap=\[\]` selects no module"),
    ({"wrap": "Block"}, "`wrap='Block'` must be a list of module classes"),
    ({"wrap": [3]}, "`wrap` has 3, which is neither a module class nor the name of one"),
    (
        {"tensor_parallel_size": 2},
        "`tensor_parallel_size=2`: replicas and shards follow from the nodes. Use `hierarchy=",
    ),
    ({"true_mean": 1}, "`true_mean=1`: `true_mean` must be a bool"),
    ({"shard_gather": "int4"}, "`shard_gather='int4'` must be one of 'bf16', 'int8', or None"),
    ({"shard_scatter": "topk"}, "`shard_scatter='topk'` must be one of 'bf16', 'int8', 'int4', or None"),
    ({"shard_gather": PowerSGD()}, r"`shard_gather=PowerSGD\(.*\)`: choose one of 'bf16', 'int8', or None"),
    ({"shard_scatter": 8}, "`shard_scatter=8` must be one of 'bf16', 'int8', 'int4', a method with its options"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CommOptShardedStrategy(**options)


def one_rank_a_node() -> None:
    fit_sharded(sharded("int8"), Regression(), batches(1), num_nodes=2, devices=1)


def test_nodes_of_one_rank_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="Parameters cannot be sharded inside nodes, since each node has one rank"):
        pool.run(one_rank_a_node, 2, nodes=2)


class Replaced(pl.Callback):
    """Another hook replaces ours."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for group in trainer.strategy._shards:
            group.managed._all_reduce_hook = lambda flat: None


def replaced() -> None:
    fit_sharded(sharded("int8"), Regression(), batches(2), callbacks=[Replaced()])


def test_no_hook_calls_are_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="Method `int8` was not called in a synchronising backward"):
        pool.run(replaced, 4, **NODES)


@pytest.mark.parametrize("method", ["", *METHODS])
def test_names(method: str) -> None:
    name = f"commopt_hsdp_{method}" if method else "commopt_hsdp"
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is CommOptShardedStrategy
    assert strategy.compression.name == (method or "bf16")
