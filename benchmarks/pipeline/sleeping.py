"""A pipeline whose stages sleep: time passes as if each rank had a processor of its own."""

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.pipeline import ScheduleName, schedule_named
from lightning_commopt.pipeline.runner import Runner
from lightning_commopt.pipeline.timing import StepTimer, Timed
from lightning_commopt.pipeline.trace import Flow, Shape

__all__ = ["FORWARD", "Timing", "time_schedules"]

FORWARD = 0.020
"""Seconds that one rank sleeps in the forwards of a microbatch; its backwards take twice as long."""

Timing = tuple[ScheduleName, int, list[tuple[tuple[Timed, ...], float]]]
"""Schedule, microbatches, and for each step when this rank's actions ran and the seconds that it took."""

_SHAPE = Shape((), torch.float32, requires_grad=True)


class _Sleeper:
    """Forwards and backwards of stages that share a rank's time."""

    def __init__(self, stages_per_rank: int) -> None:
        self.forward = FORWARD / stages_per_rank
        self.inputs = self.weights = self.forward
        self._puts_off = False

    def backward(self) -> None:
        time.sleep(self.inputs if self._puts_off else self.inputs + self.weights)

    def put_off(self, backward: Callable[[], None]) -> Callable[[], None]:
        self._puts_off = True
        backward()
        self._puts_off = False
        return lambda: time.sleep(self.weights)

    def compute(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = received[0] if received else torch.zeros(_SHAPE.shape, requires_grad=True)
        output: Tensor = _Sleep.apply(inputs, self)  # type: ignore[no-untyped-call]
        return (output,)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, sleeper: _Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        time.sleep(sleeper.forward)
        return inputs + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sleeper.backward()
        return grad.clone(), None


def time_schedules(microbatches: Sequence[int], steps: int) -> list[Timing]:
    """Time steps of every schedule on the ranks of the default process group, after one that does not count."""
    return [_time(name, m, steps) for name, m in product(get_args(ScheduleName), microbatches)]


def _time(name: ScheduleName, microbatches: int, steps: int) -> Timing:
    schedule = schedule_named(name, dist.get_world_size(), microbatches)
    sleeper = _Sleeper(schedule.stages // schedule.ranks)
    group = dist.group.WORLD
    assert group is not None
    runner = Runner(group, torch.device("cpu"), sleeper.put_off)
    runner.timer = StepTimer(torch.device("cpu"), kept=steps, skipped=1)
    for _ in range(1 + steps):
        dist.barrier()
        runner.run(schedule, sleeper.compute, lambda stage, _: [Flow(0, None, _SHAPE)] if stage else [])
    return name, microbatches, [(step.timeline, step.seconds) for step in runner.timer.steps()]
