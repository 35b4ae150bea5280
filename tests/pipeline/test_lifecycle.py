"""Logging, metrics, precision, evaluation and checkpoints are those of a single process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torchmetrics import Accuracy, MetricCollection
from torchmetrics.classification import MulticlassAUROC
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from tests.pipeline.toy import CLASSES, Chain, batches, distance, piped
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import ScaledFP32, loader

pytestmark = pytest.mark.runs("commopt_pipeline", "fit, validate, checkpoints, resume")


class Full(Chain):
    """Logs in every way, and has every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)
        self.several = MetricCollection([MulticlassAUROC(CLASSES), Accuracy("multiclass", num_classes=CLASSES)])
        self.register_buffer("seen", torch.zeros(()))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits.softmax(1), batch[1])
        self.log("acc", self.accuracy, on_epoch=True)
        self.log_dict({"loss": loss, "worst": logits.max()}, reduce_fx="max")
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "logits": logits}

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.several.update(logits.softmax(1), batch[1])
        self.log_dict(self.several)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        chances: Tensor = self(batch[0]).softmax(-1)
        return chances


def every_way(stages: int | None, replicas: int) -> dict[str, Any]:
    """Fit with validation, then validate, test and predict."""
    world = dist.get_world_size()
    strategy: Any = "ddp" if stages is None else CommOptPipelineStrategy(stages, 4)
    own = trainer(world, strategy, max_epochs=2, use_distributed_sampler=False)
    module = Full()
    replica = dist.get_rank() // (world // replicas)
    data, held_out = loader(batches(3, replica=replica)), loader(batches(2, 6, replica=9 + replica))
    own.fit(module, data, held_out)
    seen = {name: float(value) for name, value in own.callback_metrics.items()}
    for run in (own.validate, own.test):
        (values,) = run(module, held_out, verbose=False)
        seen |= {f"{run.__name__} {name}": value for name, value in values.items()}
    predictions: Any = own.predict(module, held_out)
    return {"metrics": seen, "predictions": torch.cat(predictions), "state": dict(module.state_dict())}


@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 2)])
def test_metrics_and_evaluation(pool: WorkerPool, world: int, stages: int) -> None:
    replicas = world // stages
    expected = pool.run(every_way, replicas, None, replicas)
    seen = pool.run(every_way, world, stages, replicas)
    for rank, outcome in enumerate(seen):
        alike = expected[rank // stages]
        assert outcome["metrics"] == pytest.approx(alike["metrics"], abs=1e-6)
        assert torch.allclose(outcome["predictions"], alike["predictions"], atol=1e-6)
        assert distance(outcome["state"], alike["state"]) < 1e-6


def precise(stages: int | None, precision: str) -> dict[str, Tensor]:
    """Fit under mixed precision; under a gradient scaler, the first scale overflows."""
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=3)
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    elif precision == "scaled":
        options = {"plugins": [ScaledFP32(2.0**10, halved_after=2)]}
    strategy: Any = "ddp" if stages is None else CommOptPipelineStrategy(stages, 4)
    own = trainer(dist.get_world_size(), strategy, max_epochs=1, gradient_clip_val=0.1, **options)
    module = Chain()
    own.fit(module, loader(batches(12)))
    return dict(module.state_dict())


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), ("fp16", 5e-4), ("scaled", 1e-6)])
def test_mixed_precision(pool: WorkerPool, precision: str, tolerance: float) -> None:
    (expected,) = pool.run(precise, 1, None, precision)
    for state in pool.run(precise, 2, 2, precision):
        assert distance(state, expected) < tolerance


def first_half(folder: Path, strategy: Any) -> None:
    """Train three batches and save."""
    own = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    own.fit(Full(), loader(batches(5)[:3]))
    own.save_checkpoint(folder / "half.ckpt")


def second_half(folder: Path, strategy: Any) -> dict[str, Tensor]:
    """Load and train the last two batches."""
    own = trainer(dist.get_world_size(), strategy, max_epochs=2, use_distributed_sampler=False)
    module = Full()
    own.fit(module, loader(batches(5)[3:]), ckpt_path=folder / "half.ckpt")
    return dict(module.state_dict())


def same_structure(one: Any, other: Any, path: str = "") -> None:
    """Two checkpoints have the same keys in the same order, and nearly the same numbers."""
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            same_structure(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same_structure(a, b, f"{path}/{index}")
    elif isinstance(one, Tensor):
        assert torch.allclose(one.double(), other.double(), atol=1e-5), path
    else:
        assert type(one) is type(other), path


PIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"microbatches": 4}),
    "zbv": (2, {"microbatches": 4, "schedule": "zbv"}),
    "four": (4, {"microbatches": 2}),
    "replicas": (4, {"stages": 2, "microbatches": 2}),
}


def pipe(run: Any, folder: Path, name: str) -> Any:
    """Run a half under a pipeline."""
    return run(folder, CommOptPipelineStrategy(**PIPES[name][1]))


def test_checkpoints_are_those_of_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(piped, 2, Full, batches, {"microbatches": 4})[0].parameters
    single, staged = tmp_path / "single", tmp_path / "staged"
    pool.run(first_half, 1, single, "ddp")
    pool.run(pipe, 2, first_half, staged, "1f1b")
    files = [torch.load(folder / "half.ckpt", weights_only=False) for folder in (single, staged)]
    same_structure(*files)
    for name, folder in (("1f1b", single), ("zbv", staged), ("four", staged), ("replicas", single)):
        for state in pool.run(pipe, PIPES[name][0], second_half, folder, name):
            assert distance(state, whole) < 1e-6, (name, folder)
    (state,) = pool.run(second_half, 1, staged, "ddp")
    assert distance(state, whole) < 1e-6
    module = Full.load_from_checkpoint(staged / "half.ckpt")
    assert distance(dict(module.state_dict()), files[1]["state_dict"]) == 0


def while_training(folder: Path) -> list[str]:
    """Checkpoints of a callback, in the middle of an epoch."""
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, monitor="mean", save_on_train_epoch_end=False)
    strategy = CommOptPipelineStrategy(microbatches=4)
    own = trainer(2, strategy, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    own.fit(Full(), loader(batches(5)))
    return sorted(saver.best_k_models)


def test_checkpoints_of_a_callback(pool: WorkerPool, tmp_path: Path) -> None:
    names = pool.run(while_training, 2, tmp_path)
    assert len(names[0]) == 2
    assert names[0] == names[1]
    saved = torch.load(names[0][-1], weights_only=False)
    assert list(saved["state_dict"]) == list(Full().state_dict())
    assert len(saved["optimizer_states"][0]["state"]) == len(list(Full().parameters()))


class Raises(Chain):
    """Fails in the last block of one batch, on one stage alone."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 1:

            def fail(*args: Any) -> None:
                raise ZeroDivisionError("in a block")

            self.layers[-1].register_forward_pre_hook(fail)


def failing() -> None:
    """One stage raises in the second batch."""
    own = trainer(2, CommOptPipelineStrategy(microbatches=4), max_epochs=1)
    own.fit(Raises(), loader(batches(5)))


def test_stages_fail_together(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="ZeroDivisionError: in a block") as caught:
        pool.run(failing, 2, timeout=40)
    text = str(caught.value)
    assert re.search(r"RankFailure: rank 1, in training_step of step 1, raised .*ZeroDivisionError: in a block", text)
    assert "no answer" not in text
