"""DeepSpeed ZeRO trains as DDP does, with and without compression, through the whole life of a run."""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_commopt.callbacks import CommMonitor, CommSummary
from lightning_commopt.zero.consolidate import consolidate
from tests.pool import WorkerFailure, WorkerPool
from tests.strategies.toy import Regression, batches, distance, flat, loader
from tests.strategies.zero_toy import STEPS, Full, ZeroFit, ZeroResume, resumed, zero_fit, zero_strategy

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.runs("commopt_deepspeed", "stage {stage}", stage=(0, 1, 2, 3)),
]

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """DeepSpeed warns at import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed")


ELEMENTS = [p.numel() for p in Regression().parameters()]


@dataclass
class Lives:
    """What a rank saw at one stage."""

    fits: dict[str, ZeroFit]
    whole_life: dict[str, ZeroFit]
    bf16: dict[str, ZeroFit]
    resume: ZeroResume


LIFE: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2, "validate": True, "max_epochs": 2}
"""Of epochs whose last window is short. Gradients are clipped in some steps and not in others: their size shows."""
BOTH = ("none", "int8")


def live(stage: int, folder: Path) -> Lives:
    def of(method: str, steps: int, optimizer: str = "adamw", **options: Any) -> ZeroFit:
        return zero_fit(zero_strategy(stage, method), Regression(optimizer), batches(steps), **options)

    return Lives(
        {method: of(method, STEPS) for method in BOTH},
        {method: of(method, 11, "sgd", **LIFE) for method in BOTH},
        {method: of(method, 8, precision="bf16-mixed") for method in BOTH},
        resumed(stage, folder),
    )


def live_in_ddp() -> tuple[ZeroFit, ZeroFit]:
    return zero_fit("ddp", data=batches(STEPS)), zero_fit("ddp", Regression("sgd"), batches(11), **LIFE)


@pytest.fixture(scope="module")
def ddp(pool: WorkerPool) -> tuple[ZeroFit, ZeroFit]:
    return pool.run(live_in_ddp, 2)[0]


@pytest.fixture(scope="module", params=STAGES)
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(stage: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"stage{stage}")


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool, stage: int, folder: Path) -> list[Lives]:
    """Every rank's lives at a stage: one run, since each imports DeepSpeed anew."""
    return pool.run(live, 2, stage, folder, timeout=100)


def test_ends_where_ddp_ends(ranks: list[Lives], ddp: tuple[ZeroFit, ZeroFit]) -> None:
    fits, expected = ranks[0].fits, ddp[0].parameters
    assert distance(fits["none"].parameters, expected) < 1e-5
    assert 0 < distance(fits["int8"].parameters, expected) < 0.01
    for method in BOTH:
        assert torch.equal(ranks[1].fits[method].parameters, fits[method].parameters)


def test_bytes_are_counted(ranks: list[Lives], stage: int) -> None:
    """Two ranks: each sends its half of what a ring sends; at stage 3 once, with parts padded to whole elements."""
    none, int8 = (ranks[0].fits[method].stats for method in BOTH)
    assert none is not None
    assert int8 is not None
    elements = sum(n + n % 2 for n in ELEMENTS) if stage == 3 else 2 * sum(ELEMENTS)
    assert none.sent_bytes == none.dense_bytes == int8.dense_bytes == STEPS * 4 * elements // 2
    assert int8.sent_bytes == int8.promised.total
    assert int8.rounds == int8.applied_steps == STEPS
    assert int8.compression_ratio is not None
    assert 3 < int8.compression_ratio < 4


def test_accumulate_clip_and_validate(ranks: list[Lives], ddp: tuple[ZeroFit, ZeroFit], stage: int) -> None:
    for method, near in (("none", 1e-5), ("int8", 0.01)):
        fit = ranks[0].whole_life[method]
        assert distance(fit.parameters, ddp[1].parameters) < near
        assert fit.validated == pytest.approx(ddp[1].validated, rel=near)
        assert fit.steps == ddp[1].steps == 12
        assert fit.stats is not None
        assert fit.stats.applied_steps == 12
        assert fit.stats.rounds == (12 if stage < 2 else 22)  # from stage 2 on, DeepSpeed reduces in every backward


def test_bf16_precision(ranks: list[Lives]) -> None:
    none, int8 = (ranks[0].bf16[method] for method in BOTH)
    assert 0 < distance(int8.parameters, none.parameters) < 0.02
    assert int8.stats is not None
    assert int8.stats.compression_ratio is not None
    assert 1.5 < int8.stats.compression_ratio < 2  # of two bytes


def test_resume_is_exact(ranks: list[Lives]) -> None:
    for rank in ranks:
        for method, (straight, continued) in rank.resume.fits.items():
            assert torch.equal(straight, continued), method
        assert not torch.equal(rank.resume.fits["none"][0], rank.resume.fits["int4"][0])


def test_one_file_loads_without_deepspeed(ranks: list[Lives], folder: Path, stage: int) -> None:
    consolidate(folder / "int4", folder / "one.ckpt")
    model = Regression()
    full = Full()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    single = Trainer(accelerator="cpu", devices=1, callbacks=[full], **quiet)
    single.validate(model, loader(batches(2, rank=0)), ckpt_path=folder / "one.ckpt", verbose=False)
    assert torch.equal(flat(model), ranks[0].resume.saved)
    validated = ranks[0].resume.validated
    if stage < 3:
        assert validated == pytest.approx(full.validated)
    else:  # DeepSpeed would raise something else, later
        assert isinstance(validated, str)
        assert "loads sharded parameters of stage 3 into a fit only" in validated


METHODS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.01, "int4": 0.05, "onebit": 0.3}
"""How far from `none` 20 steps on three ranks may end."""


def each_method() -> list[ZeroFit]:
    data = batches(20)
    without = [zero_fit(zero_strategy(3, "int4", residuals=False), data=data)]
    return without + [zero_fit(zero_strategy(3, method), data=data) for method in ("none", *METHODS)]


def test_methods_on_three_ranks(pool: WorkerPool) -> None:
    """At stage 3; how stages below sum, on three ranks too, is tested without DeepSpeed."""
    by_rank = pool.run(each_method, 3)
    without, none, *fits = by_rank[0]
    sent = []
    for i, (method, bound) in enumerate(METHODS.items()):
        fit = fits[i]
        assert 0 < distance(fit.parameters, none.parameters) < bound, method
        assert all(torch.equal(rank[2 + i].parameters, fit.parameters) for rank in by_rank)
        assert fit.stats is not None
        assert fit.stats.sent_bytes == fit.stats.promised.total
        assert method in fit.explain.lower()
        sent.append(fit.stats.sent_bytes)
    bf16, fp16, int8, int4, onebit = sent
    assert fp16 > bf16 > int8 > int4 > onebit
    kept = fits[list(METHODS).index("int4")]
    assert distance(kept.parameters, none.parameters) < distance(without.parameters, none.parameters)


def others() -> tuple[list[ZeroFit], ZeroFit, CommSummary | None]:
    data = batches(12)
    everything = {"offload_optimizer": True, "offload_parameters": True}
    offload = [
        zero_fit(zero_strategy(stage, "int8", **options), Regression("sgd"), batches(11), **LIFE)
        for stage, options in ((2, {"offload_optimizer": True}), (3, everything))
    ]
    dense = zero_fit(zero_strategy(2, "onebit", start_step=4), data=data)
    monitor = CommMonitor(every_n_steps=4)
    zero_fit(zero_strategy(2, "none"), data=data, callbacks=[monitor])
    return offload, dense, monitor.summary


def test_offload_dense_steps_and_monitor(pool: WorkerPool, ddp: tuple[ZeroFit, ZeroFit]) -> None:
    offload, dense, summary = pool.run(others, 2)[0]
    for fit in offload:
        assert distance(fit.parameters, ddp[1].parameters) < 0.01
        assert '"offload_optimizer": {"device": "cpu"' in fit.explain
    assert dense.stats is not None
    four_steps = 4 * 4 * sum(ELEMENTS)
    assert four_steps < dense.stats.promised.payload < 1.1 * four_steps  # and eight small ones
    assert summary is not None
    metrics = summary.metrics()
    assert 0 < metrics["commopt/exposed_comm_ms"] < metrics["commopt/step_ms"]
    assert metrics["commopt/sent_mb_per_step"] == pytest.approx(4 * sum(ELEMENTS) / 1e6)  # as counted at stage 2


def twice() -> list[float]:
    """How far two fits of one module end from two of DDP, by stage."""

    def fits(strategy: Callable[[], Any]) -> Tensor:
        model = Regression("sgd")
        zero_fit(strategy(), model, batches(4))
        return zero_fit(strategy(), model, batches(4, seed=1)).parameters

    expected = fits(lambda: "ddp")
    return [distance(fits(partial(zero_strategy, stage)), expected) for stage in STAGES]


def test_a_module_is_fitted_again(pool: WorkerPool) -> None:
    for distances in pool.run(twice, 2):
        assert distances == pytest.approx([0.0] * len(STAGES), abs=1e-5)


class Bypass(pl.Callback):
    """Something else takes DeepSpeed's backend over."""

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.strategy._backend.remove()


def wrong(what: str) -> None:
    if what == "nan":
        zero_fit(zero_strategy(2, "int4"), Regression(spoilt=(1, 2), factor=float("nan")), batches(4))
    if what == "bypassed":
        strategy = zero_strategy(2, "int8")
        zero_fit(strategy, data=batches(4), callbacks=[Bypass()])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nan", "The gradient of `layers.0.bias` and .* more is not finite on some rank"),
        ("bypassed", "No gradient of this step came to method `int8`"),
    ],
)
def test_ends_all_ranks(pool: WorkerPool, what: str, says: str) -> None:
    with pytest.raises(WorkerFailure, match=says) as caught:
        pool.run(wrong, 2, what)
    assert len(caught.value.errors) == 2
