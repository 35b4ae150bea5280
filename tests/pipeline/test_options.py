"""Options of a pipeline from the command line, and what other parts of the package make of a pipeline."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy, CommOptStrategy
from lightning_commopt.callbacks import LinearLRScaling
from tests.pipeline.toy import Chain, batches
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader

OPTIONS: dict[str, tuple[object, object]] = {
    "stages": (2, 2),
    "microbatches": (6, 6),
    "schedule": ("zbv", "zbv"),
    "blocks": ("[a, b]", ("a", "b")),
    "cuts": ("[1, c]", (1, "c")),
    "stages_per_rank": (2, 2),
    "loss": ("sum", "sum"),
    "tensor_parallel": (2, 2),
    "plan": ("gpt2", "gpt2"),
    "activations": ("bf16", "bf16"),
    "memory_limit_gb": (1.5, 1.5),
    "different_batches": ("broadcast", "broadcast"),
    "compression": ("int8", "int8"),
}
"""Each option: its flag, and what it comes to."""


def test_every_option_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    own = set(inspect.signature(CommOptPipelineStrategy).parameters) - {"kwargs"}
    assert own == set(OPTIONS)
    chosen = ["--trainer.strategy=lightning_commopt.CommOptPipelineStrategy", "--trainer.strategy.nonfinite=skip"]
    chosen += [f"--trainer.strategy.{name}={value}" for name, (value, _) in OPTIONS.items()]
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    cli = LightningCLI(BoringModel, args=[*quiet, *chosen], run=False, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, CommOptPipelineStrategy)
    seen = vars(strategy) | {"different_batches": strategy._batches.policy, "compression": strategy.compression.name}
    assert {name: seen[name] for name in OPTIONS} == {name: value for name, (_, value) in OPTIONS.items()}
    assert strategy.nonfinite == "skip"


def rates(stages: int | None) -> list[float]:
    """The learning rates of a fit under `LinearLRScaling`, in its steps."""

    class Rates(Chain):
        @override
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    seen: list[float] = []
    strategy: Any = CommOptStrategy("none") if stages is None else CommOptPipelineStrategy(stages, 4)
    callback = LinearLRScaling(4, warmup_steps=2, batch_size_per_device=8)
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[callback])
    fitter.fit(Rates(optimizer="adamw"), loader(batches(4)))
    return seen


def test_learning_rates_follow_the_replicas(pool: WorkerPool) -> None:
    """Stages see the same samples: two replicas of two stages are two devices."""
    expected = pool.run(rates, 2, None)
    assert pool.run(rates, 4, 2) == [*expected, *expected]
    assert pool.run(rates, 2, 2) == pool.run(rates, 1, None) * 2


class Breaks(Chain):
    """Fails on every rank in the second batch."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ZeroDivisionError("in a hook")


def broken(folder: Path) -> None:
    """A fit that fails, with a callback that saves then."""
    saver = ModelCheckpoint(folder, save_on_exception=True)
    strategy = CommOptPipelineStrategy(microbatches=4)
    fitter = trainer(2, strategy, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    try:
        fitter.fit(Breaks(), loader(batches(3)))
    except ZeroDivisionError:
        return
    raise AssertionError("it did not fail")


def test_no_half_checkpoint_after_a_failure(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(broken, 2, tmp_path, timeout=60)
    assert "No checkpoint was written: after a failure the stages of other ranks are out of reach" in pool.output[0]
    assert not list(tmp_path.rglob("*.ckpt"))
