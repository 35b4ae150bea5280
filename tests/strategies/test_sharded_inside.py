"""Codecs inside a node: nothing is lost, parameters keep their bits, what cannot be encoded is refused."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commopt import CommStats, Int8
from tests.pool import WorkerFailure, WorkerPool, trainer
from tests.strategies.chosen import SHAPES, Chosen, mean_gradient, total
from tests.strategies.sharded_toy import fit_sharded, sharded
from tests.strategies.test_conserved import TwoPasses
from tests.strategies.test_sharded import Logging
from tests.strategies.toy import Regression, batches, fresh_loop, loader, state_of

pytestmark = pytest.mark.runs("commopt_hsdp", "encoded exchange inside nodes")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}
STEPS = 6


# ---- conservation ---------------------------------------------------------------------------------------------------


class Discarding(Chosen):
    """Throws the gradients of every first of two passes away."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for number in (2 * batch_idx, 2 * batch_idx + 1):
            optimizer.zero_grad()
            self.manual_backward(self.loss(number))
        optimizer.step()


class Spoilt(Chosen):
    """One gradient of one rank is not finite in step 2."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch_idx)
        return loss + self.get_parameter("g").sum() * (torch.inf if (self.global_rank, batch_idx) == (1, 2) else 0)


@dataclass
class Kept:
    """What a rank has after a fit.

    Args:
        applied: Sum of what was applied to each parameter.
        state: Its residuals.
        stats: Counters.
    """

    applied: dict[str, Tensor]
    state: dict[str, Any]
    stats: CommStats | None


def keep(make: Callable[[], Chosen], method: Any, steps: int = STEPS, nodes: int = 2, **options: Any) -> Kept:
    window = {"accumulate_grad_batches": options.pop("window", 1)}
    strategy, model = sharded(method, wrap=None, **options), make()
    ran = fit_sharded(strategy, model, [torch.zeros(1)] * steps, num_nodes=nodes, **window)
    applied = {
        name: -(p.full_tensor() if isinstance(p, DTensor) else p).detach().double()
        for name, p in model.named_parameters()
    }
    return Kept(applied, state_of(strategy), ran.stats)


def keep_all() -> dict[str, Kept]:
    """Each way of stepping, and each pair of codecs at least once."""
    return {
        "automatic": keep(Chosen, "none", shard_gather="int8", shard_scatter=Int8(stochastic=True)),
        "accumulated": keep(Chosen, "int8", shard_scatter="int4", window=3),
        "two passes": keep(TwoPasses, "int4", STEPS // 2, shard_scatter="int8"),
        "discarded": keep(Discarding, "int8", STEPS // 2, shard_scatter="int4"),
        "spoilt": keep(Spoilt, "none", shard_scatter="int8", nonfinite="skip"),
    }


def waiting(kept: list[Kept], replicas: int = 2) -> dict[str, Tensor]:
    """What residuals will still add to each parameter."""
    found = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in SHAPES.items()}
    for one in kept:
        for kind, share in (("first", replicas), ("scatter", len(kept))):
            for name, pieces in one.state.get(kind, {}).items():
                for first, values in pieces:
                    end = min(first + values.numel(), found[name].numel())  # a shard may be padded
                    found[name][first:end] += values[: end - first].double() / share
    return found


def assert_kept(kept: list[Kept], truth: Mapping[str, Tensor], residuals: bool = True) -> None:
    still = waiting(kept)
    for name, expected in truth.items():
        assert all(torch.equal(one.applied[name], kept[0].applied[name]) for one in kept)
        torch.testing.assert_close(
            kept[0].applied[name] + still[name].view_as(expected), expected, atol=2e-5, rtol=0, msg=name
        )
    assert all(one.state["scatter"]["g"][0][1].any() for one in kept), "something was left to be conserved"
    assert not torch.equal(kept[0].state["scatter"]["g"][0][1], kept[-1].state["scatter"]["g"][0][1])


def test_nothing_is_lost_inside_nodes(pool: WorkerPool) -> None:
    ranks = pool.run(keep_all, 4, **NODES)
    mean: dict[str, list[Tensor]] = {n: [mean_gradient(n, i, 4) for i in range(STEPS)] for n in SHAPES}
    truths = {
        "automatic": {n: total(mean[n]) for n in SHAPES},
        "accumulated": {n: total(mean[n]) / 3 for n in SHAPES},
        "two passes": {n: total(mean[n]) for n in SHAPES},
        "discarded": {n: total(mean[n][1::2]) for n in SHAPES},
        "spoilt": {n: total(m for i, m in enumerate(mean[n]) if i != 2) for n in SHAPES},
    }
    for kind, truth in truths.items():
        assert_kept([rank[kind] for rank in ranks], truth)
    for rank in ranks:
        for kept in rank.values():
            assert kept.stats is not None
            assert kept.stats.sent_bytes == kept.stats.promised.total
        accumulated, spoilt = rank["accumulated"].stats, rank["spoilt"].stats
        assert accumulated is not None
        assert spoilt is not None
        assert accumulated.hook_calls == accumulated.rounds == STEPS // 3, "replicas meet once a window"
        assert (spoilt.applied_steps, spoilt.skipped_steps) == (STEPS - 1, 1)


def one_node() -> Kept:
    return keep(Chosen, "int8", nodes=1, shard_gather="bf16", shard_scatter="int8")


def test_codecs_work_without_a_second_node(pool: WorkerPool) -> None:
    ranks = pool.run(one_node, 2, timeout=60.0)
    still = waiting(ranks, replicas=1)
    for name in SHAPES:
        expected = total(mean_gradient(name, i, 2) for i in range(STEPS))
        torch.testing.assert_close(ranks[0].applied[name] + still[name].view_as(expected), expected, atol=2e-5, rtol=0)
    for rank in ranks:
        assert rank.stats is not None
        assert rank.stats.sent_bytes == rank.stats.promised.inside_node + rank.stats.promised.header
        assert not rank.state.get("first")


# ---- evaluation -----------------------------------------------------------------------------------------------------


def evaluate() -> tuple[float, float, list[CommStats]]:
    """The loss of the validation in a fit, that of one after it, and statistics after each, and after a second fit."""
    data, model = batches(3), Logging()
    strategy = sharded("int8", shard_gather="int8", shard_scatter="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitter = trainer(4, strategy, max_epochs=1, use_distributed_sampler=False, num_nodes=2)
        fitter.fit(model, loader(data), loader(data))
        during, stats = float(fitter.callback_metrics["val_loss"]), [strategy.comm_stats()]
        fitter.validate(model, loader(data), verbose=False)
        after = float(fitter.callback_metrics["val_loss"])
        stats.append(strategy.comm_stats())
        fitter.fit_loop = fresh_loop(fitter)
        fitter.fit(model, loader(data), loader(data))
        stats.append(strategy.comm_stats())
    return during, after, stats


def test_evaluation_computes_with_what_training_does(pool: WorkerPool) -> None:
    for during, after, stats in pool.run(evaluate, 4, **NODES):
        assert after == during
        assert stats[1] == stats[0], "an evaluation after the fit leaves its statistics alone"
        assert stats[2].promised == stats[0].promised
        assert stats[2].sent_bytes == stats[2].promised.total


# ---- what cannot be encoded -----------------------------------------------------------------------------------------


class Odd(Regression):
    """Shards itself in a way that a codec cannot follow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @override
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh, policy = self.device_mesh["shard"], MixedPrecisionPolicy()
        if self.how == "types":
            self.layers[5].bias.requires_grad_(False)
            self.layers[5].bias.data = self.layers[5].bias.data.double()
        if self.how == "halves":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(self.layers, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        if self.how == "own":
            self.layers.set_custom_all_gather(Own())  # type: ignore[operator]
        if self.how == "divided":
            self.layers.set_gradient_divide_factor(3.0)  # type: ignore[operator]


class Own:
    """An all-gather of the user's; never called."""


def fit_odd(how: str, option: str, codec: str) -> None:
    fit_sharded(sharded("none", wrap=None, **{option: codec}), Odd(how), batches(1), num_nodes=1)


@pytest.mark.parametrize(
    ("how", "option", "codec", "message"),
    [
        (
            "types",
            "shard_gather",
            "int8",
            "parameters of the group with `layers.0.weight` are gathered in several",
        ),
        (
            "halves",
            "shard_gather",
            "bf16",
            "`shard_gather='bf16'` has no effect, since parameters are gathered in 16",
        ),
        ("own", "shard_gather", "int8", "the group with `layers.0.weight` has a collective of its own, `Own`"),
        ("divided", "shard_scatter", "int8", "has a gradient divide factor: leave `set_gradient_divide_factor` out"),
    ],
)
def test_groups_that_no_codec_can_follow_are_refused(
    pool: WorkerPool, how: str, option: str, codec: str, message: str
) -> None:
    with pytest.raises(WorkerFailure, match=message):
        pool.run(fit_odd, 2, how, option, codec, timeout=60.0)
