"""`LinearLRScaling` on several ranks: one unit for rate and warm-up, resumed on as many ranks as there are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from lightning_commopt.callbacks import LinearLRScaling
from tests.lr_toy import BASE, Fit, Saved, Toy, fit, loader, scaled_fp16
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("callbacks", "LinearLRScaling")

STEPS = 14
WARM_UP = 10
SAVED_AT = 5


def scales(factor: float, applied: list[int]) -> list[float]:
    """From 1 to `factor` in ten applied steps, written out by hand."""
    return [1 + (factor - 1) * min(count / WARM_UP, 1) for count in applied]


def applied_before(spoilt: int) -> list[int]:
    """How many steps were applied before each of a fit, one of which is skipped."""
    return [step - (step > spoilt) for step in range(STEPS)]


# ---- rate and warm-up in one unit -----------------------------------------------------------------------------------

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "none": lambda: "commopt_none",
    "int8": lambda: CommOptStrategy("int8", start_step=0),
}


def fit_case(strategy: str | Strategy, spoilt: int | None, saved: Saved | None = None, **options: Any) -> Fit:
    """Tuned at a batch of 32; 16 a device, 4 accumulated; rank 1 alone yields inf in one step."""
    data = loader(4 * STEPS, ranks=dist.get_world_size())
    model = Toy(spoilt=None if spoilt is None else (1, spoilt))
    callbacks = [LinearLRScaling(32, warmup_steps=WARM_UP), *([saved] if saved else [])]
    options = {"strategy": strategy, "accumulate_grad_batches": 4, "plugins": [precision := scaled_fp16()], **options}
    ran = fit(model, data, *callbacks, **options)
    assert precision.scaler is not None
    assert precision.scaler.update.__func__ is torch.amp.GradScaler.update  # given back
    return ran


def fit_and_resume(strategy: str, spoilt: int, folder: Path) -> tuple[Fit, Fit]:
    """A whole fit, and one from its checkpoint."""
    saved = Saved(folder, SAVED_AT)
    whole = fit_case(STRATEGIES[strategy](), spoilt, saved)
    return whole, fit_case(STRATEGIES[strategy](), spoilt, ckpt_path=saved.path)


@pytest.mark.parametrize("spoilt", [3, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peak_after_ten_applied_steps_and_after_resume(
    pool: WorkerPool, strategy: str, spoilt: int, tmp_path: Path
) -> None:
    ranks = pool.run(fit_and_resume, 2, strategy, spoilt, tmp_path)
    expected = [BASE * scale for scale in scales(4.0, applied_before(spoilt))]
    assert expected[WARM_UP] < 4 * BASE == expected[WARM_UP + 1]
    for whole, rest in ranks:
        assert whole.first == pytest.approx(expected, rel=1e-12)
        assert whole.first[WARM_UP + 1 :] == [4 * BASE] * (STEPS - WARM_UP - 1)
        assert rest.used == whole.used[SAVED_AT:]
        assert whole.left == rest.left == [(4 * BASE, BASE / 2)]
        assert whole.state == rest.state == {"applied_steps": [STEPS - 1], "effective_batch_size": 128.0}
        assert not whole.warnings + rest.warnings
    done = 4 if spoilt < SAVED_AT else 5
    text = (
        "`LinearLRScaling`: batch 32 -> 128 (16 per device x 2 ranks x 4 accumulated), learning rate x 4 (linear): "
        "0.1 -> 0.4, 0.0125 -> 0.05, reached after 10 applied steps"
    )
    assert [run.lines for run in ranks[0]] == [[f"{text}."], [f"{text} ({done} done)."]]
    assert [run.lines for run in ranks[1]] == [[], []]


def fit_skipping() -> Fit:
    """No scaler: the strategy itself skips."""
    strategy = CommOptStrategy("int8", start_step=0, nonfinite="skip")
    return fit(Toy(spoilt=(1, 3)), loader(STEPS, ranks=2), LinearLRScaling(8, warmup_steps=WARM_UP), strategy=strategy)


def test_steps_that_the_strategy_skips_do_not_warm_up(pool: WorkerPool) -> None:
    expected = [BASE * scale for scale in scales(4.0, list(range(STEPS - 1)))]  # the module sees no skipped step
    for ran in pool.run(fit_skipping, 2):
        assert ran.first == pytest.approx(expected, rel=1e-12)


# ---- another number of ranks ----------------------------------------------------------------------------------------


def save_case(folder: Path, step: int) -> None:
    """Write a checkpoint on two ranks."""
    fit_case("ddp", None, Saved(folder, step), max_steps=step)


def resume_case(path: Path) -> Fit:
    """Go on from it."""
    return fit_case("ddp", None, ckpt_path=path, max_steps=STEPS)


@pytest.mark.parametrize(("world", "factor"), [(1, 2.0), (4, 8.0)])
@pytest.mark.parametrize("step", [SAVED_AT, WARM_UP + 2])
def test_resume_on_other_ranks_scales_from_the_base(
    pool: WorkerPool, world: int, factor: float, step: int, tmp_path: Path
) -> None:
    pool.run(save_case, 2, tmp_path, step)
    ranks = pool.run(resume_case, world, tmp_path / f"step{step}.ckpt")
    expected = [BASE * scale for scale in scales(factor, list(range(STEPS)))]
    for ran in ranks:
        assert ran.first == pytest.approx(expected[step:], rel=1e-12)
        assert ran.left == [(factor * BASE, factor * BASE / 8)]
    assert ranks[0].lines[1] == (
        f"`LinearLRScaling`: the checkpoint was written with an effective batch of 128; this run has {32 * factor:g}, "
        f"and its peak is {factor:g} times the base rate, not 4 times."
    )


# ---- which ranks count ----------------------------------------------------------------------------------------------


def fit_uneven() -> Fit:
    """8 samples on rank 0, 24 on rank 1."""
    size = (8, 24)[dist.get_rank()]
    callback = LinearLRScaling(8, warmup_steps=3)
    return fit(Toy(), loader(5, size), callback, use_distributed_sampler=False)


def test_rates_are_equal_where_batches_are_not(pool: WorkerPool) -> None:
    ranks = pool.run(fit_uneven, 2)
    assert ranks[0].used == ranks[1].used
    assert ranks[0].left == [(4 * BASE, BASE / 2)]


class TwoStages(DDPStrategy):
    """Pretends that all ranks see the same data, as the stages of a pipeline do."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


def fit_stages() -> Fit:
    """Two ranks that hold one replica."""
    return fit(Toy(), loader(3), LinearLRScaling(8, warmup_steps=0), strategy=TwoStages())


def test_only_data_parallel_ranks_count(pool: WorkerPool) -> None:
    for ran in pool.run(fit_stages, 2):
        assert ran.left == [(2 * BASE, BASE / 4)]


def fit_alone() -> tuple[Fit, float]:
    """Gradients are not averaged, so that rank 1 alone skips."""

    class Local(Toy):
        @override
        def on_train_start(self) -> None:
            self.trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[union-attr]

    precision = scaled_fp16()
    ran = fit(
        Local(spoilt=(1, 3)), loader(STEPS, ranks=2), LinearLRScaling(8, warmup_steps=WARM_UP), plugins=[precision]
    )
    assert precision.scaler is not None
    return ran, precision.scaler.get_scale()


def test_a_step_that_one_rank_skips_counts_nowhere(pool: WorkerPool) -> None:
    (zero, scale_zero), (one, scale_one) = pool.run(fit_alone, 2)
    assert scale_zero != scale_one
    assert zero.used == one.used
    assert zero.first == pytest.approx([BASE * scale for scale in scales(4.0, applied_before(3))], rel=1e-12)
