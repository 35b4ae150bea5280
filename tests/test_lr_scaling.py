"""`LinearLRScaling` in one process: options, every kind of scheduler, other code that touches learning rates."""

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from typing_extensions import override

from lightning_commopt.callbacks import LinearLRScaling
from lightning_commopt.callbacks.lr_scaling.step_verdict import StepVerdict
from tests.lr_toy import BASE, Fit, Saved, Toy, Vectors, fit, fit_with, loader, make_trainer, scaled_fp16

pytestmark = pytest.mark.runs("callbacks", "LinearLRScaling")

WARM_UP = 5


def scales(steps: int, factor: float = 4.0, warmup: int = WARM_UP) -> list[float]:
    """From 1 to `factor` in `warmup` steps, written out by hand."""
    return [1 + (factor - 1) * min(step / warmup, 1) for step in range(steps)]


def quadrupled(**options: Any) -> LinearLRScaling:
    """Batches of 16 where the rate was tuned for 4."""
    return LinearLRScaling(4, **({"warmup_steps": WARM_UP} | options))


# ---- the scale ------------------------------------------------------------------------------------------------------


def test_every_group_warms_up_to_its_peak_and_stays() -> None:
    ran = fit(Toy(), loader(8), quadrupled())
    assert ran.first == pytest.approx([BASE * scale for scale in scales(8)], rel=1e-12)
    assert [second / first for first, second in ran.used] == pytest.approx([1 / 8] * 8)
    assert ran.first[WARM_UP:] == [4 * BASE] * 3
    assert ran.left == [(4 * BASE, BASE / 2)]
    assert ran.state == {"applied_steps": [8], "effective_batch_size": 16.0}


def test_peak_holds_after_exactly_so_many_steps() -> None:
    assert fit(Toy(), loader(WARM_UP - 1), quadrupled()).left[0][0] < 4 * BASE
    assert fit(Toy(), loader(WARM_UP), quadrupled()).left[0][0] == 4 * BASE


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rule": "sqrt"}, scales(8, 2.0)),
        ({"warmup_steps": 0}, [4.0] * 8),
        ({"warmup_steps": None, "warmup_epochs": 0.5}, scales(8, 4.0, 4)),
        ({"warmup_steps": None}, scales(8, 4.0, 40)),
        ({"start_factor": 0.0}, [4 * min(step / 5, 1) for step in range(8)]),
        ({"start_factor": 1.0}, [4.0] * 8),
        ({"schedule": "constant"}, scales(8)),
        ({"batch_size_per_device": 12}, scales(8, 3.0)),
    ],
)
def test_options_shape_the_scale(options: dict[str, Any], expected: list[float]) -> None:
    ran = fit(Toy(), loader(8), quadrupled(**options))
    assert ran.first == pytest.approx([BASE * scale for scale in expected], rel=1e-12)


def test_a_smaller_batch_begins_at_its_peak() -> None:
    assert fit(Toy(), loader(3), LinearLRScaling(64)).first == [BASE / 4] * 3


@pytest.mark.parametrize("total", [None, 9])
def test_cosine_after_the_warm_up(total: int | None) -> None:
    steps = 12
    ran = fit(Toy(), loader(steps), quadrupled(schedule="cosine", min_factor=0.1, total_steps=total))
    expected = scales(steps)
    for step in range(WARM_UP, steps):
        done = min(1, (step - WARM_UP) / ((total or steps) - WARM_UP))
        expected[step] = 4 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
    assert ran.first == pytest.approx([BASE * scale for scale in expected], rel=1e-12)


# ---- the effective batch --------------------------------------------------------------------------------------------


def test_accumulation_counts_and_may_change() -> None:
    changing = GradientAccumulationScheduler({0: 2, 1: 4})
    callback = LinearLRScaling(16, warmup_steps=0)
    ran = fit(Toy(), loader(8), callback, changing, max_epochs=2)
    assert ran.first == pytest.approx([2 * BASE] * 4 + [4 * BASE] * 2)
    assert ran.lines[0].startswith("`LinearLRScaling`: batch 16 -> 32 (16 per device x 1 rank x 2 accumulated)")
    assert "effective batch 64" in ran.lines[1]
    assert (callback.effective_batch_size, callback.factor) == (64, 4)


def batch_sampled() -> "DataLoader[Tensor]":
    data = Vectors(64)
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False))


def test_batch_sampler_tells_the_batch_size() -> None:
    assert fit(Toy(), batch_sampled(), LinearLRScaling(4, warmup_steps=0)).first[0] == 2 * BASE


class Stream(IterableDataset[Tensor]):
    """Ready-made batches, nobody knows how many."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(6, 16, 2))


def test_unknown_batch_size_asks_for_it() -> None:
    stream = DataLoader(Stream(), batch_size=None)
    with pytest.raises(ValueError, match="`batch_size_per_device`"):
        fit(Toy(), stream, quadrupled())
    assert fit(Toy(), stream, quadrupled(batch_size_per_device=16)).left[0][0] == 4 * BASE


def test_several_loaders_ask_for_it() -> None:
    class Pairs(Toy):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    data = {"a": loader(6), "b": loader(6, batch_size=4)}
    with pytest.raises(ValueError, match="2 DataLoaders.*`batch_size_per_device`"):
        fit(Pairs(), data, quadrupled())
    assert fit(Pairs(), data, quadrupled(batch_size_per_device=16)).left[0][0] == 4 * BASE


# ---- schedulers -----------------------------------------------------------------------------------------------------


def every(interval: str, make: Callable[[Optimizer], Any], **config: Any) -> Callable[[Optimizer], Any]:
    """A `configure_optimizers` with one scheduler."""

    def configured(optimizer: Optimizer) -> Any:
        scheduler = {"scheduler": make(optimizer), "interval": interval, **config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return configured


def warm_then_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    phases = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 8, 0.01)]
    return lr_scheduler.SequentialLR(optimizer, phases, [3])


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.3, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULES = {
    "lambda": every("step", lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step)),
    "multiplicative": every("step", lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9)),
    "step": every("epoch", lambda o: lr_scheduler.StepLR(o, 1, 0.25)),
    "multistep": every("step", lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5), frequency=2),
    "exponential": every("step", lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "cosine": every("step", lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.01)),
    "restarts": every("step", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.01)),
    "polynomial": every("step", lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0)),
    "onecycle": every("step", lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.1], total_steps=18)),
    "cyclic": every("step", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False)),
    "sequential": every("step", warm_then_cosine),
    "chained": every("step", chained),
    "plateau": every(
        "epoch", lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", 0.5, 0, min_lr=[0.03, 0.002]), monitor="falling"
    ),
    "plateau_steps": every(
        "step", lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", 0.5, 1, min_lr=[0.03, 0.002]), monitor="falling"
    ),
}


def scaled(alone: Fit, scale: list[float]) -> list[Any]:
    """What every group is expected to use."""
    return [pytest.approx([lr * s for lr in step], rel=1e-12) for step, s in zip(alone.used, scale, strict=True)]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_any_scheduler_gives_what_is_scaled(schedule: Callable[[Optimizer], Any]) -> None:
    alone = fit(Toy(schedule), loader(6), max_epochs=3)
    ran = fit(Toy(schedule), loader(6), quadrupled(warmup_steps=14), max_epochs=3)
    assert len(set(alone.used)) > 1
    assert [list(step) for step in ran.used] == scaled(alone, scales(18, 4.0, 14))
    assert not ran.warnings


def test_cosine_schedule_as_written_by_hand() -> None:
    ran = fit(Toy(SCHEDULES["cosine"]), loader(10), quadrupled())
    cosine = [0.01 + (BASE - 0.01) * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert ran.first == pytest.approx([lr * scale for lr, scale in zip(cosine, scales(10), strict=True)])


@pytest.mark.parametrize("step", [5, 11])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_resume_in_and_after_the_warm_up(schedule: Callable[[Optimizer], Any], step: int, tmp_path: Path) -> None:
    rest = []
    for name, callbacks in (("alone", []), ("scaled", [quadrupled(warmup_steps=8)])):
        (folder := tmp_path / name).mkdir()
        saved = Saved(folder, step)
        fit(Toy(schedule), loader(6), *callbacks, saved, max_epochs=3)
        callbacks = [quadrupled(warmup_steps=8)] if callbacks else []
        rest.append(fit(Toy(schedule), loader(6), *callbacks, max_epochs=3, ckpt_path=saved.path))
    alone, ran = rest
    assert [list(step) for step in ran.used] == scaled(alone, scales(18, 4.0, 8)[step:])
    assert ran.state["applied_steps"] == [18]
    assert f"reached after 8 applied steps ({step} done)" in ran.lines[0]
    assert not ran.warnings


def test_scheduler_looks_as_ever_and_is_given_back() -> None:
    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            scheduler = trainer.lr_scheduler_configs[0].scheduler
            assert isinstance(scheduler, lr_scheduler.LambdaLR)
            assert repr(type(scheduler)) == repr(lr_scheduler.LambdaLR)
            assert scheduler.base_lrs == [BASE, BASE / 8]
            assert not any(callable(value) for value in scheduler.state_dict().values())

    schedulers: list[lr_scheduler.LambdaLR] = []

    def configured(optimizer: Optimizer) -> Any:
        schedulers.append(lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
        return [optimizer], schedulers

    fit(Toy(configured), loader(3), quadrupled(), Look())
    assert type(schedulers[0]) is lr_scheduler.LambdaLR


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_our_schedule_refuses_another(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"schedule='{schedule}'.*`StepLR`.*remove one"):
        fit(Toy(SCHEDULES["step"]), loader(8), quadrupled(schedule=schedule))


def test_tensor_rates_are_filled_in_place() -> None:
    class Captured(Toy):
        @override
        def configure_optimizers(self) -> Any:
            self.tensor = torch.tensor(BASE)
            optimizer = Adam(self.parameters(), self.tensor, capturable=False, foreach=False)
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.6)]

    model = Captured()
    ran = fit(model, loader(4), quadrupled(), max_epochs=2)
    expected = [BASE * 0.6 ** (step // 4) * scale for step, scale in enumerate(scales(8))]
    assert ran.first == pytest.approx(expected, rel=1e-5)
    assert float(model.tensor) == ran.left[0][0]
    assert not ran.warnings


# ---- several optimizers ---------------------------------------------------------------------------------------------


class ByHand(Toy):
    """Two optimizers with a scheduler each; the second one steps with every other batch."""

    def __init__(self, spoilt: tuple[int, int] | None = None) -> None:
        super().__init__(spoilt=spoilt)
        self.automatic_optimization = False
        self.used_by: list[list[float]] = [[], []]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        for index, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            if index == 0 or batch_idx % 2 == 0:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                scheduler.step()

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        index = self.trainer.optimizers.index(optimizer)
        self.used_by[index].append(optimizer.param_groups[0]["lr"])

    @override
    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.first.parameters(), BASE), Adam(self.second.parameters(), 1e-3)]
        return optimizers, [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def test_each_optimizer_has_its_own_warm_up() -> None:
    model = ByHand()
    ran = fit(model, loader(16), quadrupled(warmup_steps=6))
    for base, steps, used in zip((BASE, 1e-3), (16, 8), model.used_by, strict=True):
        assert used == pytest.approx([base * 0.9**step * scale for step, scale in enumerate(scales(steps, 4.0, 6))])
    assert ran.state["applied_steps"] == [16, 8]
    assert len(ran.lines) == 1
    assert "0.1 -> 0.4, 0.001 -> 0.004, reached after 6 applied steps" in ran.lines[0]


def test_each_optimizer_counts_its_own_skipped_step() -> None:
    model = ByHand(
        spoilt=(0, 3)
    )  # the second step of the first optimizer: 0 and 1 are of the first batch, 2 of the next
    fit(model, loader(16), quadrupled(warmup_steps=6), plugins=[scaled_fp16()])
    first, second = (scales(steps, 4.0, 6) for steps in (16, 8))
    first = first[:3] + first[2:-1]
    for base, expected, used in zip((BASE, 1e-3), (first, second), model.used_by, strict=True):
        assert used == pytest.approx([base * 0.9**step * scale for step, scale in enumerate(expected)])


def test_manual_optimisation_asks_for_steps() -> None:
    with pytest.raises(ValueError, match="warm-up of 5 epochs.*manual optimisation.*`warmup_steps`"):
        fit(ByHand(), loader(4), LinearLRScaling(4))


def test_manual_cosine_asks_for_its_end() -> None:
    class NoScheduler(ByHand):
        @override
        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()[0]

    with pytest.raises(ValueError, match="`total_steps`"):
        fit(NoScheduler(), loader(4), quadrupled(schedule="cosine"))


# ---- skipped steps --------------------------------------------------------------------------------------------------


def test_skipped_steps_do_not_warm_up() -> None:
    ran = fit(Toy(spoilt=(0, 2)), loader(8), quadrupled(), plugins=[scaled_fp16()])
    expected = scales(8)
    assert ran.first == pytest.approx([BASE * scale for scale in expected[:3] + expected[2:-1]])
    assert ran.state["applied_steps"] == [7]


def test_scaler_gets_its_update_back() -> None:
    precision = scaled_fp16()
    fit(Toy(), loader(2), quadrupled(), plugins=[precision])
    assert precision.scaler is not None
    assert precision.scaler.update.__func__ is torch.amp.GradScaler.update


def test_deepspeed_engine_is_asked() -> None:
    class Engine(DeepSpeedStrategy):
        def __init__(self) -> None:
            self.last = True

        @property
        def deepspeed_engine(self) -> Any:
            return SimpleNamespace(was_step_applied=lambda: self.last)

    strategy = Engine()
    verdict = StepVerdict(SimpleNamespace(strategy=strategy, precision_plugin=None))  # type: ignore[arg-type]
    optimizer = SGD([torch.zeros(1)], 0.1)
    answers = []
    for strategy.last in (True, False):
        answers.append(verdict.applied(optimizer))
    assert answers == [True, False]


# ---- other code that touches learning rates -------------------------------------------------------------------------


def test_lr_find_is_unharmed(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [quadrupled()]):
        model = Toy()
        fitter = make_trainer(callbacks=callbacks, max_epochs=1, default_root_dir=tmp_path)
        finder = Tuner(fitter).lr_find(model, loader(40), num_training=30)
        assert finder is not None
        found.append(finder.results)
        assert model.lr == finder.suggestion()
    assert found[0] == found[1]
    ran = fit_with(fitter, model, loader(8))
    assert ran.first[-8:] == pytest.approx([model.lr * scale for scale in scales(8)])


class FindAgain(LearningRateFinder):
    """Looks for a learning rate when training has begun."""

    @override
    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)


def test_lr_find_when_training_has_begun(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [quadrupled()]):
        finder = FindAgain(num_training_steps=6, update_attr=False)
        model = Toy()
        ran = fit(model, loader(4), *callbacks, finder, max_epochs=2, default_root_dir=tmp_path)
        assert finder.optimal_lr is not None
        found.append(finder.optimal_lr.results)
    assert len(found[0]["lr"]) == 6
    assert found[0] == found[1]
    assert ran.first[6:] == pytest.approx([BASE * scale for scale in scales(8)])
    assert ran.warnings == [text for text in ran.warnings if "`LearningRateFinder` suggests" in text]
    assert len(ran.warnings) == 1


def test_batch_size_finder_and_fast_dev_run(tmp_path: Path) -> None:
    class Sized(Toy):
        batch_size = 2

        def train_dataloader(self) -> "DataLoader[Tensor]":
            return loader(32, self.batch_size)

    model, callback = Sized(), quadrupled()
    fitter = make_trainer(callbacks=[callback], max_epochs=1, default_root_dir=tmp_path)
    assert Tuner(fitter).scale_batch_size(model, max_trials=3, steps_per_trial=1) == 8
    assert fit_with(fitter, model, None).left[0][0] == 2 * BASE
    assert fit(Sized(), None, callback, fast_dev_run=True).left[0][0] == BASE / 2


class Unfreeze(BaseFinetuning):
    """Adds a group at epoch 1, with a rate taken from the first group, and changes it at epoch 2."""

    @override
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.second)

    @override
    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.second, optimizer, initial_denom_lr=10)
        if epoch == 2:
            optimizer.param_groups[1]["lr"] *= 5


class OneGroup(Toy):
    """Its second layer is in no group at first."""

    @override
    def configure_optimizers(self) -> Any:
        return SGD(self.first.parameters(), BASE)


def test_groups_added_later_are_scaled() -> None:
    alone = fit(OneGroup(), loader(4), Unfreeze(), max_epochs=3)
    for callbacks in ([quadrupled(warmup_steps=10), Unfreeze()], [Unfreeze(), quadrupled(warmup_steps=10)]):
        ran = fit(OneGroup(), loader(4), *callbacks, max_epochs=3)
        assert [len(step) for step in ran.used] == [1] * 4 + [2] * 8
        assert [list(step) for step in ran.used] == scaled(alone, scales(12, 4.0, 10))
        assert not ran.warnings


def test_scheduler_exchanged_by_weight_averaging() -> None:
    ran = []
    for callbacks in ([], [quadrupled()]):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2)
        ran.append(fit(Toy(SCHEDULES["step"]), loader(3), *callbacks, averaging, max_epochs=5))
    assert len(set(ran[0].first)) > 2
    assert [list(step) for step in ran[1].used] == scaled(ran[0], scales(15))
    assert not ran[1].warnings


def test_rates_written_by_hand_are_scaled_and_reported() -> None:
    class Decaying(Toy):
        @override
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * 0.9**batch_idx
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    ran = fit(Decaying(), loader(8), quadrupled())
    assert ran.first == pytest.approx([BASE * 0.9**step * scale for step, scale in enumerate(scales(8))])
    assert len(ran.warnings) == 1
    assert "set the learning rate of a parameter group to" in ran.warnings[0]


# ---- never twice ----------------------------------------------------------------------------------------------------


class Reused(Toy):
    """Gives the same optimizer to every fit, with a new scheduler."""

    optimizer: SGD | None = None

    @override
    def configure_optimizers(self) -> Any:
        self.optimizer = self.optimizer or SGD(self.parameters(), BASE)
        return [self.optimizer], [lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.25**epoch)]


@pytest.mark.parametrize("same_callback", [True, False])
def test_second_fit_with_the_same_optimizer(same_callback: bool) -> None:
    model, callback = Reused(), quadrupled(warmup_steps=6)
    first = fit(model, loader(4), callback)
    again = callback if same_callback else quadrupled(warmup_steps=6)
    second = fit(model, loader(4), again)
    assert first.first == pytest.approx([BASE * scale for scale in scales(8, 4.0, 6)[:4]])
    assert second.first[4:] == pytest.approx([BASE * scale for scale in scales(8, 4.0, 6)[4:]])
    assert not second.warnings


def test_second_fit_with_a_new_optimizer_warms_up_again() -> None:
    callback = quadrupled()
    runs = [fit(Toy(), loader(8), callback), fit(Toy(), loader(8), callback)]
    assert runs[0].used == runs[1].used
    assert runs[1].first == pytest.approx([BASE * scale for scale in scales(8)])


def test_callback_travels_to_other_processes() -> None:
    callback = quadrupled()
    fit(Toy(), loader(2), callback)
    assert pickle.loads(pickle.dumps(callback)).options == callback.options


def test_checkpoint_of_a_run_without_scaling_is_warmed_up_from_its_rate(tmp_path: Path) -> None:
    saved = Saved(tmp_path, 3)
    fit(Toy(), loader(12), saved)
    ran = fit(Toy(), loader(12), quadrupled(), ckpt_path=saved.path)
    assert ran.first == pytest.approx([BASE * scale for scale in scales(9)])


def test_failed_fit_gives_everything_back() -> None:
    class Failing(Reused):
        fails = True

        @override
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.fails and batch_idx == 1:
                raise RuntimeError("on purpose")

    model, callback = Failing(), quadrupled(warmup_steps=6)
    precision = scaled_fp16()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, loader(4), callback, plugins=[precision])
    assert precision.scaler is not None
    assert precision.scaler.update.__func__ is torch.amp.GradScaler.update
    model.fails = False
    assert fit(model, loader(4), callback).first[2:] == pytest.approx([BASE * s for s in scales(6, 4.0, 6)[2:]])


# ---- words ----------------------------------------------------------------------------------------------------------


def test_one_line_says_it_all() -> None:
    ran = fit(Toy(), loader(8), quadrupled(warmup_steps=2), accumulate_grad_batches=2)
    assert ran.lines == [
        "`LinearLRScaling`: batch 4 -> 32 (16 per device x 1 rank x 2 accumulated), learning rate x 8 (linear): "
        "0.1 -> 0.8, 0.0125 -> 0.1, reached after 2 applied steps."
    ]


@pytest.mark.parametrize(
    ("base", "options", "advised"),
    [(1, {}, True), (2, {}, False), (1, {"gradient_clip_val": 0.5}, False), (1, {"gradient_clip_val": 0}, True)],
)
def test_large_factors_advise_clipping(base: int, options: dict[str, Any], advised: bool) -> None:
    ran = fit(Toy(), loader(4), LinearLRScaling(base, warmup_steps=2), **options)
    assert any("`gradient_clip_val`" in line for line in ran.lines) == advised


def test_own_clipping_needs_no_advice() -> None:
    class Clipping(Toy):
        @override
        def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 1.0, "norm")

    assert len(fit(Clipping(), loader(4), LinearLRScaling(1, warmup_steps=2)).lines) == 1


def test_warm_up_longer_than_the_fit_is_said() -> None:
    ran = fit(Toy(), loader(8), quadrupled(warmup_steps=9))
    assert ran.lines[1] == "`LinearLRScaling`: the fit ends after 8 optimizer steps, before its warm-up does."


def test_unknown_length_asks_for_steps() -> None:
    stream = DataLoader(Stream(), batch_size=None)
    with pytest.raises(ValueError, match="training data has no length.*`warmup_steps`"):
        fit(Toy(), stream, LinearLRScaling(4, batch_size_per_device=16))
    with pytest.raises(ValueError, match="`total_steps`"):
        fit(Toy(), stream, quadrupled(batch_size_per_device=16, schedule="cosine"))


def test_cosine_must_be_longer_than_the_warm_up() -> None:
    with pytest.raises(ValueError, match="ends after 8 steps, and the warm-up takes 9"):
        fit(Toy(), loader(8), quadrupled(schedule="cosine", warmup_steps=9))


def test_group_without_rate_is_refused() -> None:
    class NoRate(Toy):
        @override
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), BASE)
            del optimizer.param_groups[0]["lr"]
            return optimizer

    with pytest.raises(ValueError, match="`lr` in every parameter group of `SGD`"):
        fit(NoRate(), loader(2), quadrupled())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_batch_size": 0}, "`base_batch_size` must be at least 1, got 0"),
        ({"rule": "cubic"}, "`rule` must be 'linear' or 'sqrt', got 'cubic'"),
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0, got -1"),
        ({"warmup_epochs": -0.5}, "`warmup_epochs` must be at least 0, got -0.5"),
        ({"warmup_epochs": math.inf}, "`warmup_epochs` must be at least 0, got inf"),
        ({"warmup_steps": 5, "warmup_epochs": 1}, "takes one of `warmup_steps` and `warmup_epochs`, got both: 5 and 1"),
        ({"schedule": "linear"}, "`schedule` must be None, 'constant' or 'cosine', got 'linear'"),
        ({"start_factor": 1.5}, "`start_factor` must be in 0..1, got 1.5"),
        ({"min_factor": -0.1, "schedule": "cosine"}, "`min_factor` must be in 0..1, got -0.1"),
        ({"min_factor": 0.1}, "`min_factor` must be 0 unless `schedule='cosine'`, got 0.1"),
        ({"total_steps": 100}, "`total_steps` must be None unless `schedule='cosine'`, got 100"),
        ({"total_steps": 0, "schedule": "cosine"}, "`total_steps` must be at least 1, got 0"),
        ({"batch_size_per_device": 0}, "`batch_size_per_device` must be at least 1, got 0"),
        ({"start_factor": math.nan}, "`start_factor` must be in 0..1, got nan"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=".*") as caught:
        LinearLRScaling(**({"base_batch_size": 32} | options))
    assert message in str(caught.value)
