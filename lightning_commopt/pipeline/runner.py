"""Executes a schedule: computes, sends and receives what its lists say, in their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.pipeline.actions import Action, Kind, Schedule
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.messages import Message, incoming, outgoing
from lightning_commopt.pipeline.timing import StepTimer
from lightning_commopt.pipeline.trace import Flow
from lightning_commopt.pipeline.transfers import Operation, Receive, Send, lower

__all__ = ["Runner", "forwards_of"]


class Compute(Protocol):
    """Runs a microbatch through a stage."""

    def __call__(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what is sent on, or the loss."""


@dataclass
class _Kept:
    """What a backward needs."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass
class _Step:
    """The state of one step."""

    compute: Compute
    flows: Callable[[int, int], Sequence[Flow]]
    timer: StepTimer | None
    ready: dict[Message, tuple[Tensor, ...]] = field(default_factory=dict)
    arriving: dict[Message, tuple[list[dist.Work], list[torch.dtype]]] = field(default_factory=dict)
    leaving: list[dist.Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # until they have left
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)


class Runner:
    """Runs steps of one rank of a pipeline.

    Args:
        group: The ranks of the pipeline.
        device: Where they compute.
        put_off: Runs a backward for inputs, and returns what computes the gradients of weights later.
        wire: What float32 tensors travel as between ranks; as they are without it.

    Attributes:
        timer: Times steps that run backwards, if there is one.

    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        put_off: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self._wire = wire
        self._group, self._device = group, device
        self._rank = dist.get_rank(group)
        self._put_off = put_off
        self._later: dict[tuple[int, int], Callable[[], None]] = {}
        self.timer: StepTimer | None = None

    def run(self, schedule: Schedule, compute: Compute, flows: Callable[[int, int], Sequence[Flow]]) -> None:
        """Run one step.

        Args:
            schedule: What each rank computes.
            compute: Runs a microbatch through a stage of this rank. With gradients off, there is no backward.
            flows: Tells what enters a stage with a microbatch.

        """
        step = _Step(compute, flows, self.timer if torch.is_grad_enabled() else None)
        self._later.clear()
        if step.timer is not None:
            step.timer.begin()
        for operation in _lowered(schedule)[self._rank]:
            if isinstance(operation, Send):
                self._send(step, operation)
            elif isinstance(operation, Receive):
                self._receive(step, operation)
            else:
                self._act(step, schedule, operation)
        for work in step.leaving:
            work.wait()
        if step.timer is not None:
            step.timer.end()

    # ---- transfers ------------------------------------------------------------------------------------------------

    def _send(self, step: _Step, send: Send) -> None:
        peer = dist.get_global_rank(self._group, send.peer)
        for made in step.ready.pop(send.message):
            tensor = made.to(self._travels_as(made.dtype))
            work = dist.isend(tensor, peer, group=self._group)
            assert work is not None
            step.leaving.append(work)
            step.sent.append(tensor)

    def _receive(self, step: _Step, receive: Receive) -> None:
        peer = dist.get_global_rank(self._group, receive.peer)
        shapes = [flow.tensor for flow in _of(step, receive)]
        buffers = [torch.empty(s.shape, dtype=self._travels_as(s.dtype), device=self._device) for s in shapes]
        works = []
        for buffer in buffers:
            work = dist.irecv(buffer, peer, group=self._group)
            assert work is not None
            works.append(work)
        step.arriving[receive.message] = works, [s.dtype for s in shapes]
        step.ready[receive.message] = tuple(buffers)

    @staticmethod
    def _take(step: _Step, message: Message) -> tuple[Tensor, ...]:
        tensors = step.ready.pop(message)
        if message not in step.arriving:  # from a stage of this rank
            return tensors
        works, dtypes = step.arriving.pop(message)
        for work in works:
            work.wait()
        return tuple(tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True))

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._wire if self._wire is not None and dtype is torch.float32 else dtype

    # ---- computation ----------------------------------------------------------------------------------------------

    def _act(self, step: _Step, schedule: Schedule, action: Action) -> None:
        awaited = incoming(action, schedule.stages)
        tensors = () if awaited is None else self._take(step, awaited)
        start = None if step.timer is None else step.timer.now()
        if action.kind is Kind.FORWARD:
            made = self._forward(step, action, tensors)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            self._later.pop((action.stage, action.microbatch))()
            made = ()
        else:
            made = self._backward(step, action, tensors)
        if step.timer is not None:
            step.timer.note(action, start)
        message = outgoing(action, schedule.stages)
        if message is not None:
            step.ready[message] = made

    def _forward(self, step: _Step, action: Action, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stage, microbatch = action.stage, action.microbatch
        trains = torch.is_grad_enabled()
        if trains:
            for flow, tensor in zip(step.flows(stage, microbatch), received, strict=True):
                tensor.requires_grad_(flow.tensor.requires_grad)
        outputs = step.compute(stage, microbatch, received)
        if trains:
            step.kept[stage, microbatch] = _Kept(received, outputs)
        return tuple(output.detach() for output in outputs)

    def _backward(self, step: _Step, action: Action, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = step.kept.pop((action.stage, action.microbatch))
        outputs = [output for output in kept.outputs if output.requires_grad]
        if gradients and len(gradients) != len(outputs):
            raise PipelineError("Other outputs of a stage need a gradient than when the step was traced.")

        def run() -> None:
            if outputs:
                torch.autograd.backward(outputs, list(gradients) or None)

        if action.kind is Kind.BACKWARD_INPUT and self._put_off is not None:
            self._later[action.stage, action.microbatch] = self._put_off(run)
        else:
            run()
            self._later[action.stage, action.microbatch] = _nothing
        inputs = [tensor for tensor in kept.inputs if tensor.requires_grad]
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs)


def forwards_of(schedule: Schedule) -> Schedule:
    """Return a schedule without its backwards."""
    actions = (tuple(a for a in rank if a.kind is Kind.FORWARD) for rank in schedule.actions)
    return Schedule(schedule.placement, tuple(actions))


@lru_cache(maxsize=64)
def _lowered(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    return lower(schedule)


def _of(step: _Step, receive: Receive) -> list[Flow]:
    """Return the tensors of a message."""
    message = receive.message
    stage = message.source if message.is_gradient else message.target
    flows = step.flows(stage, message.microbatch)
    return [flow for flow in flows if flow.tensor.requires_grad or not message.is_gradient]


def _nothing() -> None:
    """There is nothing left to do."""
