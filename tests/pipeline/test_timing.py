"""Steps are timed, and what they show is told."""

import re
import time
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from lightning_commopt.pipeline import Action, Kind
from lightning_commopt.pipeline.timing import StepTimer, Timed, TimedStep
from tests.pipeline.toy import Chain, batches
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader


class Event:
    """An event of a stream on which a millisecond passes between two of them."""

    clock = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.done = False

    def record(self) -> None:
        type(self).clock += 1
        self.at = self.clock

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: "Event") -> float:
        return float(other.at - self.at)


def test_on_a_gpu_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"), kept=2, skipped=1)
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    for _ in range(4):
        timer.begin()
        for action in actions:
            timer.note(action, timer.now())
        timer.end()
    timeline = (Timed(actions[0], 0.001, 0.002), Timed(actions[1], 0.003, 0.004))
    assert timer.steps() == [TimedStep(1, timeline, 0.005)] * 2


class Slow(Chain):
    """The second half of its blocks sleeps."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[4:]:
            layer.register_forward_pre_hook(sleep)


def sleep(module: Any, args: Any) -> None:
    time.sleep(0.003)


class Asking(Slow):
    """Asks in the middle of a fit."""

    early = ""

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, CommOptPipelineStrategy)
        if batch_idx in (0, 4):
            self.early = strategy.bubble_report()
            assert bool(self.early) == (batch_idx == 4)


def told() -> tuple[str, str]:
    """What is said in the fit, and after it."""
    strategy = CommOptPipelineStrategy(microbatches=4, cuts=[4])
    module = Asking()
    trainer(2, strategy, max_epochs=1, use_distributed_sampler=False).fit(module, loader(batches(6)))
    return module.early, strategy.explain()


def test_the_heavy_stage_is_told(pool: WorkerPool) -> None:
    for during, after in pool.run(told, 2):
        for text in (during, after):
            assert re.search(r"Bubble of `1f1b` with 4 microbatches: [\d.]+% of a step of", text)
            assert "Stage 1 is the heaviest" in text
            assert re.search(r"`cuts=\[[56]\]` instead of \[4\] would shorten the step", text), text
    assert "Stage 1 is the heaviest" in pool.output[0]
