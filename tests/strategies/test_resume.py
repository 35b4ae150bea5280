"""A resumed run is the run that never stopped, bit for bit; another world size or method keeps the mean residual."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import BF16, Int4, Int8, Uncompressed
from lightning_commopt.strategies import residual_checkpoint
from tests.methods import Case, named_case
from tests.pool import WorkerPool
from tests.strategies.toy import (
    SMALL_BUCKETS,
    Fit,
    Regression,
    ScaledFP32,
    batches,
    compresses,
    each_method,
    each_route,
    fit,
    same_bits,
    state_of,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "checkpoints and resume")

STEPS = 5
"""Steps of an epoch."""
NONE, INT8 = Case(Uncompressed()), Case(Int8())


class SaveAfterFirstEpoch(pl.Callback):
    """Saves one checkpoint of each kind at the end of the first epoch.

    Args:
        folder: Where to put `inline.ckpt`, `files.ckpt`, `mean.ckpt`, `drop.ckpt`.
        kinds: Which of them.
    """

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        self.folder = folder
        self.kinds = kinds

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch > 0:
            return
        limit = residual_checkpoint._INLINE_BYTES
        for kind in self.kinds:
            residual_checkpoint._INLINE_BYTES = -1 if kind == "files" else limit
            checkpoint = getattr(trainer.strategy, "_checkpoint", None)
            if checkpoint is not None:
                checkpoint.policy = kind if kind in ("mean", "drop") else "per_rank"
            trainer.save_checkpoint(self.folder / f"{kind}.ckpt")
        residual_checkpoint._INLINE_BYTES = limit


class StateAtStart(pl.Callback):
    """Keeps the state of the exchange as training begins."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = state_of(trainer.strategy)


@dataclass
class Run:
    """What one rank has after a fit.

    Args:
        fit: Parameters and what was said.
        start: State of the exchange at the start.
        end: The same at the end.
        optimizer: The optimizer's state.
    """

    fit: Fit
    start: dict[str, Any]
    end: dict[str, Any]
    optimizer: dict[Any, Any]

    def assert_same(self, other: "Run") -> None:
        """Parameters, optimizer and state of the exchange have the same bits."""
        assert torch.equal(self.fit.parameters, other.fit.parameters)
        assert same_bits(self.optimizer, other.optimizer)
        assert self.end.keys() == other.end.keys()
        for kind, parts in self.end.items():
            assert same_bits([parts[name] for name in sorted(parts)], [other.end[kind][name] for name in sorted(parts)])


def run(
    case: Case | None,
    folder: Path,
    *,
    resume: str | None = None,
    save: Sequence[str] = (),
    epochs: int = 2,
    strategy: Mapping[str, Any] | None = None,
    scaled: bool = False,
    **options: Any,
) -> Run:
    """Fit, from the start or from a checkpoint; a case of None is stock DDP."""
    options_of_strategy = dict(strategy or {})
    chosen = DDPStrategy(**SMALL_BUCKETS) if case is None else strategy_of(case, **options_of_strategy)  # type: ignore[arg-type]
    start, model = StateAtStart(), Regression()
    optimizers: list[torch.optim.Optimizer] = []
    model.on_train_end = lambda: optimizers.append(model.optimizers().optimizer)  # type: ignore[method-assign,union-attr]
    ran = fit(
        chosen,
        model,
        batches(STEPS),
        ckpt_path=None if resume is None else folder / f"{resume}.ckpt",
        max_epochs=epochs,
        callbacks=[start, SaveAfterFirstEpoch(folder, save)],
        plugins=[ScaledFP32(1024.0)] if scaled else [],
        **options,
    )
    return Run(ran, start.state, state_of(chosen), optimizers[0].state_dict()["state"])


def resume_each(case: Case | None, folder: Path, kinds: Sequence[str], **options: Any) -> list[Run]:
    """Resume from several checkpoints, one after another."""
    return [run(case, folder, resume=kind, **options) for kind in kinds]


# ---- exact ----------------------------------------------------------------------------------------------------------


EXACT = [
    *((INT8, world) for world in (2, 3, 4)),
    *(
        (case, world)
        for case, world in zip(
            map(named_case, ("int4", "onebit", "topk-density=0.05", "powersgd-rank=2")), (4, 2, 3, 4), strict=True
        )
    ),
    (named_case("int8-block=32-stochastic=True"), 3),
    (replace(INT8, hierarchy=2), 4),
]
"""Every method; that each is exact on every number of ranks is a law on the gradient path."""


@pytest.mark.parametrize(("case", "world"), EXACT, ids=[f"{case.id}-{world}" for case, world in EXACT])
def test_resume_is_exact(pool: WorkerPool, tmp_path: Path, case: Case, world: int) -> None:
    whole = pool.run(run, world, case, tmp_path, save=["inline", "files"])
    assert [path.name for path in tmp_path.glob("inline.ckpt*")] == ["inline.ckpt"]
    assert len(list(tmp_path.glob("files.ckpt.commopt-*-rank*.pt"))) == world
    resumed = pool.run(resume_each, world, case, tmp_path, ["inline", "files"])
    for uninterrupted, both in zip(whole, resumed, strict=True):
        assert uninterrupted.fit.buckets >= 3
        assert any(t.abs().max() > 0 for t in _first(uninterrupted.end))
        for continued in both:
            assert continued.fit.steps == 2 * STEPS
            assert continued.fit.stats is not None
            assert continued.fit.stats.rounds == STEPS  # of this fit
            assert not continued.fit.warnings
            continued.assert_same(uninterrupted)


def _first(state: Mapping[str, Any]) -> list[Tensor]:
    """First-hop residuals."""
    return [tensor for parts in state["first"].values() for _, tensor in parts]


@each_method(lambda case: compresses(case) and not case.lossy)
def test_resume_of_casts_is_exact(pool: WorkerPool, tmp_path: Path, case: Case, world: int) -> None:
    whole = pool.run(run, world, case, tmp_path, save=["inline"])
    for uninterrupted, continued in zip(whole, pool.run(run, world, case, tmp_path, resume="inline"), strict=True):
        continued.assert_same(uninterrupted)
        assert not continued.fit.warnings


VARIANTS: dict[str, dict[str, Any]] = {
    "dense beginning": {"strategy": {"start_step": STEPS + 2}},
    "unused parameters": {"strategy": {"find_unused_parameters": True}},
    "bucket views": {"strategy": {"gradient_as_bucket_view": True}},
    "skip": {"strategy": {"nonfinite": "skip"}},
    "scaler": {"scaled": True},
    "accumulation": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact_under(pool: WorkerPool, tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant]
    whole = pool.run(run, 3, INT8, tmp_path, save=["inline"], **options)
    for uninterrupted, continued in zip(
        whole, pool.run(run, 3, INT8, tmp_path, resume="inline", **options), strict=True
    ):
        continued.assert_same(uninterrupted)
        assert continued.fit.stats is not None
        assert uninterrupted.fit.stats is not None
        assert continued.fit.stats.applied_steps == uninterrupted.fit.stats.applied_steps // 2


@pytest.mark.parametrize("world", [2, 3])
def test_none_resumes_as_ddp_does(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    (tmp_path / "ours").mkdir()
    pool.run(run, world, None, tmp_path, epochs=1, save=["inline"])
    pool.run(run, world, NONE, tmp_path / "ours", epochs=1, save=["inline"])
    stock = pool.run(run, world, None, tmp_path, resume="inline")
    ours = pool.run(run, world, NONE, tmp_path / "ours", resume="inline")
    for reference, ran in zip(stock, ours, strict=True):
        ran.assert_same(reference)
        assert not ran.fit.warnings
    assert residual_checkpoint.KEY not in torch.load(tmp_path / "ours" / "inline.ckpt", weights_only=True)


# ---- not exact, but nothing is lost ---------------------------------------------------------------------------------


def mean_residual(states: Sequence[Mapping[str, Any]], shards: int = 1) -> dict[str, Tensor]:
    """Mean over senders of first-hop residuals plus owners' second-hop residuals, in fp64.

    Args:
        states: Of all ranks.
        shards: Ranks of a node that share every bucket. A state that was loaded and not yet used names whole parameters
            on every rank: 1.
    """
    total = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in Regression().named_parameters()}
    for state in states:
        for kind, factor in (("first", max(shards, 1) / len(states)), ("second", 1.0)):
            for name, parts in state.get(kind, {}).items():
                for first, values in parts:
                    total[name][first : first + values.numel()] += factor * values.double()
    return total


def assert_conserved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Equal up to the rounding of fp32 sums, and not all zero."""
    largest = max(float(tensor.abs().max()) for tensor in before.values())
    assert largest > 0
    for name, tensor in before.items():
        assert (tensor - after[name]).abs().max() < 1e-6 * largest, name


@each_route(lambda case: case.lossy)
def test_mean_and_drop(pool: WorkerPool, tmp_path: Path, case: Case, world: int) -> None:
    whole = pool.run(run, world, case, tmp_path, epochs=1, save=["mean", "drop"])
    resumed = pool.run(resume_each, world, case, tmp_path, ["mean", "drop"], strategy={"residuals": "mean"})
    saved = mean_residual([ran.end for ran in whole], case.hierarchy)
    assert_conserved(saved, mean_residual([mean.start for mean, _ in resumed]))
    for mean, drop in resumed:
        assert torch.equal(mean.fit.parameters, resumed[0][0].fit.parameters)
        assert not any(t.any() for t in _first(drop.start)) if "first" in drop.start else True
        assert not mean.fit.warnings
        assert not drop.fit.warnings


@each_method(lambda case: case.lossy and case.worlds == (2, 3, 4))
def test_other_world_sizes_keep_the_mean(pool: WorkerPool, tmp_path: Path, case: Case, world: int) -> None:
    old: list[Run] = []
    for step, ranks in enumerate((2, 4, 3)):
        folder, target = tmp_path / str(step - 1), tmp_path / str(step)
        target.mkdir()
        new = pool.run(resume_elsewhere, ranks, case, folder if old else None, target)
        assert "".join(pool.output.values()).count("were regrouped") == bool(old)
        if old:
            assert_conserved(mean_residual([ran.end for ran in old]), mean_residual([ran.start for ran in new]))
        assert all(torch.equal(ran.fit.parameters, new[0].fit.parameters) for ran in new)
        assert not [text for ran in new for text in ran.fit.warnings]
        old = new


def resume_elsewhere(case: Case, source: Path | None, target: Path) -> Run:
    """One more epoch from a checkpoint of another world; its own one goes to `target`."""
    strategy, start = strategy_of(case), StateAtStart()
    path, epochs = None, 1
    if source is not None:
        path = source / "end.ckpt"
        epochs = torch.load(path, weights_only=True)["epoch"] + 2
    end = _SaveAtEnd(target / "end.ckpt")
    ran = fit(strategy, Regression(), batches(STEPS), ckpt_path=path, max_epochs=epochs, callbacks=[start, end])
    return Run(ran, start.state, state_of(strategy), {})


class _SaveAtEnd(pl.Callback):
    """Saves when the last epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


CHANGES: dict[str, tuple[Case, dict[str, Any]]] = {
    "method": (Case(Int4()), {}),
    "options": (Case(Int8(block=64)), {}),
    "buckets": (INT8, {"bucket_cap_mb": 25}),
    "to a hierarchy": (replace(INT8, hierarchy=2), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_method_keeps_the_mean(pool: WorkerPool, tmp_path: Path, change: str) -> None:
    case, options = CHANGES[change]
    old = pool.run(run, 4, INT8, tmp_path, epochs=1, save=["inline"])
    new = pool.run(run, 4, case, tmp_path, resume="inline", strategy=options)
    assert "".join(pool.output.values()).count("were regrouped") == 1
    saved = mean_residual([ran.end for ran in old])
    assert_conserved(saved, mean_residual([ran.start for ran in new]))


def test_from_a_hierarchy_keeps_the_mean(pool: WorkerPool, tmp_path: Path) -> None:
    case = replace(INT8, hierarchy=2)
    old = pool.run(run, 4, case, tmp_path, epochs=1, save=["inline"])
    new = pool.run(run, 3, INT8, tmp_path, resume="inline")
    assert_conserved(mean_residual([ran.end for ran in old], 2), mean_residual([ran.start for ran in new]))


def resume_without_residuals(folder: Path) -> list[list[str]]:
    """What is said when a cast or `none` gets a checkpoint with residuals, and when `none` gets one of a cast."""
    said = [run(case, folder, resume="inline").fit.warnings for case in (Case(BF16()), NONE)]
    run(Case(BF16()), folder, epochs=1, save=["cast"])
    return [*said, run(NONE, folder, resume="cast").fit.warnings]


def test_methods_without_residuals_say_that_they_are_dropped(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, INT8, tmp_path, epochs=1, save=["inline"])
    for rank, (cast, none, cast_to_none) in enumerate(pool.run(resume_without_residuals, 2, tmp_path)):
        assert ["`bf16` keeps none" in text for text in cast] == [True] * (rank == 0)
        assert ["no method is active" in text for text in none] == [True] * (rank == 0)
        assert not cast_to_none
    assert "mean is kept" not in "".join(pool.output.values())


def resume_from_ddp(folder: Path) -> Run:
    """Our strategy after stock DDP."""
    return run(INT8, folder, resume="inline")


def test_checkpoint_of_plain_ddp_warns_once(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, None, tmp_path, epochs=1, save=["inline"])
    for rank, ran in enumerate(pool.run(resume_from_ddp, 2, tmp_path)):
        assert ran.fit.steps == 2 * STEPS
        assert len(ran.fit.warnings) == (rank == 0)
        assert all("residuals start at zero" in text for text in ran.fit.warnings)


def save_as_many_ranks(folder: Path) -> None:
    """As with more than eight ranks."""
    residual_checkpoint._PER_RANK_UP_TO = 1
    fit(strategy_of(INT8), Regression(), batches(STEPS), callbacks=[_SaveAtEnd(folder / "default.ckpt")])


def test_many_ranks_save_the_mean_by_default(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_as_many_ranks, 2, tmp_path)
    entry = torch.load(tmp_path / "default.ckpt", weights_only=True)[residual_checkpoint.KEY]
    assert entry["policy"] == "mean"
    assert "mean" in entry
    assert "residuals" not in entry
