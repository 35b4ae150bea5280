"""A model as a pipeline: traced, cut, and run step by step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_commopt.pipeline.actions import Kind, Schedule
from lightning_commopt.pipeline.balance import DoesNotFitError
from lightning_commopt.pipeline.deferred_linear import DeferredWeights
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.memory import (
    BlockMemory,
    block_memory,
    device_bytes,
    held_microbatches,
    stage_bytes,
    within,
)
from lightning_commopt.pipeline.microbatches import Microbatch, signature, split_batch
from lightning_commopt.pipeline.named import ScheduleName, schedule_named
from lightning_commopt.pipeline.partition import Partition
from lightning_commopt.pipeline.plan import Plan, block_of_parameters, choose_cuts, costs_of, owners_of, state_owners
from lightning_commopt.pipeline.recording import StepRecorder
from lightning_commopt.pipeline.runner import Runner, forwards_of
from lightning_commopt.pipeline.slicing import Position, Slices, StageRun
from lightning_commopt.pipeline.tensor_parallel import TensorParallel, TensorParallelPlan
from lightning_commopt.pipeline.timing import StepTimer
from lightning_commopt.pipeline.trace import Flow, Shape, Trace, trace_step

__all__ = ["Engine", "EngineOptions"]

_OF_A_GPU = 0.9


@dataclass(frozen=True)
class EngineOptions:
    """What the user chose.

    Args:
        schedule: Name of the schedule.
        microbatches: Parts of a batch.
        stages_per_rank: Where the schedule leaves it open.
        cuts: By hand, or None.
        summed: Whether the loss is a sum over samples, not a mean.
        plan: Which matrices are divided among ranks, or None.
        slices: Ranks that divide them.
        wire: What float32 tensors travel as between stages; as they are without it.
        memory_limit: Most bytes of a rank; None for nine tenths of a GPU, and for any number on a CPU.

    """

    schedule: ScheduleName
    microbatches: int
    stages_per_rank: int | None
    cuts: tuple[int | str, ...] | None
    summed: bool
    memory_limit: float | None = None
    plan: TensorParallelPlan | None = None
    slices: int = 1
    wire: torch.dtype | None = None

    def schedule_of(self, ranks: int, microbatches: int) -> Schedule:
        """Return the schedule for some microbatches."""
        return schedule_named(self.schedule, ranks, microbatches, self.stages_per_rank)


class Engine:
    """One rank's part of a pipeline.

    Args:
        module: The whole model, on the CPU.
        blocks: Names of its blocks.
        options: What the user chose.
        group: The ranks of the pipeline.
        device: Where this rank computes.
        context: Is entered around the user's step: autocast.
        seed: Of random numbers in steps.

    """

    def __init__(
        self,
        module: "pl.LightningModule",
        blocks: Sequence[str],
        options: EngineOptions,
        group: dist.ProcessGroup,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        seed: int,
    ) -> None:
        self.module, self.blocks, self.options, self.device = module, tuple(blocks), options, device
        self._context, self._seed = context, seed
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.placement = options.schedule_of(self.ranks, options.microbatches).placement
        self.deferred = DeferredWeights()
        self.runner = Runner(group, device, self._put_off, options.wire)
        self.timer = self.runner.timer = StepTimer(device)
        self.costs: list[float] = []
        self._traces: dict[tuple[Any, ...], Trace] = {}
        self._shapes = {n: Shape.of(p) for n, p in module.named_parameters(remove_duplicate=False)}
        self._trainable_flags: list[bool] = []
        self.partition: Partition | None = None
        self.plan: Plan | None = None
        self.first_trace: Trace | None = None
        self._position: Position | None = None
        self._tensor: TensorParallel | None = None
        self._tracing = False
        self._state_owner: dict[str, int] = {}

    @property
    def last_rank(self) -> int:
        """The rank of the stage where steps end."""
        return self.placement[-1]

    @property
    def is_last(self) -> bool:
        """Whether steps end on this rank."""
        return self.rank == self.last_rank

    @property
    def in_step(self) -> bool:
        """Whether a step of the user is running, or being traced."""
        return self._tracing or (self._position is not None and self._position.run is not None)

    @property
    def places(self) -> list[int]:
        """Blocks before which the model may be cut."""
        assert self.first_trace is not None
        return [block for block in range(1, len(self.blocks)) if block not in self.first_trace.uncuttable]

    def state_owners(self) -> dict[str, int]:
        """Return the stage whose value of each entry of the state dict counts."""
        if self._state_owner:
            return self._state_owner
        assert self.partition is not None
        assert self.first_trace is not None
        owners = {name: (self.partition.plan_stage(name),) for name in self.partition.shapes}
        return state_owners(self.partition.state_keys, self.partition.plan, self.first_trace, owners)

    # ---- taking apart ---------------------------------------------------------------------------------------------

    def cut(self, method: str, batch: Any, extra: Sequence[Any]) -> None:
        """Trace a step, choose the cuts, and keep this rank's blocks alone."""
        module = self.module
        part = split_batch(batch, self.options.microbatches)[0]
        trace = self._trace(method, part, extra)
        self.costs = costs_of(trace, self._shapes, block_of_parameters(module, self.blocks))
        self.plan = self._choose_cuts(trace)
        self.first_trace = trace
        stages = [stage for stage, rank in enumerate(self.placement) if rank == self.rank]
        position = self._position = Position(self.plan, self.device)
        if self._splits_backward and self.options.plan is None:
            self.deferred.install(module)
        self.partition = Partition(module, position, stages)
        self.partition.place_blocks(self.device)
        self._slices = Slices(module, position, self._context)

    def _choose_cuts(self, trace: Trace) -> Plan:
        options, stages = self.options, len(self.placement)
        schedule = options.schedule_of(self.ranks, options.microbatches)
        limit = options.memory_limit
        if limit is None and self.device.type == "cuda":
            limit = _OF_A_GPU * (device_bytes(self.device) or 0)
        in_block = block_of_parameters(self.module, self.blocks)
        memory = [
            BlockMemory(block.state // options.slices, block.activations)
            for block in block_memory(trace, self._shapes, in_block)
        ]
        fits = None if limit is None else within(limit, schedule, memory)
        try:
            return choose_cuts(trace, self.blocks, stages, options.cuts, self.costs, fits)
        except DoesNotFitError as error:
            total = stage_bytes(memory, max(held_microbatches(schedule)))
            text = (
                f"{error} Weights, gradients, two moments and activations need about {total / 1e9:.2g} GB in all, and "
                f"a rank has {(limit or 0) / 1e9:.2g} GB: take more `stages`, smaller microbatches (more of them, or a "
                "smaller batch), or activation checkpointing."
            )
            if options.memory_limit is not None:
                raise PipelineError(f"{text} Or raise `memory_limit_gb`.") from None
            rank_zero_warn(text)
            return choose_cuts(trace, self.blocks, stages, options.cuts, self.costs)

    def divide(self, tensor: TensorParallel) -> None:
        """Keep this rank's part of matrices in blocks. A collective is in every forward from here on."""
        tensor.shard(self.module)
        self._tensor = tensor
        if self._splits_backward:
            self.deferred.install(self.module)

    def settle(self, method: str, batch: Any, extra: Sequence[Any]) -> dict[str, tuple[int, ...]]:
        """Find out which stages need which parameter outside of blocks, and keep this rank's alone.

        Returns:
            The stages that need each parameter, by name.

        """
        assert self.partition is not None
        assert self.plan is not None
        part = split_batch(batch, self.options.microbatches)[0]
        trace = self._trace(method, part, extra)
        self.first_trace = trace
        with self.partition.whole():
            owners = owners_of(self.module, self.plan, trace)
            self._state_owner = state_owners(self.partition.state_keys, self.plan, trace, owners)
        for cut in self.plan.cuts:
            if cut in trace.uncuttable:
                raise PipelineError(
                    f"The model was cut before block `{self.blocks[cut]}` as the first step allowed, but `{method}` "
                    f"does not: {trace.uncuttable[cut]}. Name other `cuts`."
                )
        self.partition.place_parameters(owners, self.device)
        self.trainable = {name: p for name, p in self.partition.owned.items() if p.requires_grad}
        self._trainable_flags = self._flags()
        return owners

    def restore(self, value_of: Callable[[str, nn.Parameter], Tensor]) -> None:
        """Put the model together again."""
        if self.partition is not None:
            self.partition.restore(value_of)
        self.deferred.remove()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def train(
        self, batch: Any, extra: Sequence[Any], scale: Tensor | float, number: int
    ) -> tuple[list[Tensor | None], StepRecorder]:
        """Run forwards and backwards of a batch.

        Args:
            batch: The whole one.
            extra: Further arguments of the step.
            scale: Factor on the loss to run backward on.
            number: Of the batch in the run; random numbers depend on it.

        Returns:
            The gradients of this rank's trainable parameters, in their order, and what the last stage recorded.
            Gradients that parameters had before stay as they are.

        """
        self.check_unchanged()
        parts = split_batch(batch, self.options.microbatches)
        recorder = StepRecorder(self.module, parts, scale, self.options.summed)
        schedule = self.options.schedule_of(self.ranks, len(parts))
        parameters = list(self.trainable.values())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            with torch.enable_grad(), self.deferred.deferring() if self._splits_backward else contextlib.nullcontext():
                self._run(schedule, "training_step", parts, extra, recorder, number)
            return [p.grad for p in parameters], recorder
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient

    def evaluate(self, method: str, batch: Any, extra: Sequence[Any], number: int) -> StepRecorder:
        """Run the forwards of a batch."""
        parts = split_batch(batch, self.options.microbatches)
        recorder = StepRecorder(self.module, parts, None, self.options.summed)
        schedule = forwards_of(self.options.schedule_of(self.ranks, len(parts)))
        with torch.no_grad():
            self._run(schedule, method, parts, extra, recorder, number)
        return recorder

    def _run(
        self,
        schedule: Schedule,
        method: str,
        parts: Sequence[Microbatch],
        extra: Sequence[Any],
        recorder: StepRecorder,
        number: int,
    ) -> None:
        traces = [self._trace(method, part, extra) for part in parts]
        plan = self.plan
        assert plan is not None

        def compute(stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seed = hash((self._seed, number, microbatch)) % 2**31
            run = StageRun(stage, traces[microbatch], received, seed + 7919 * (stage + 1))
            return self._slices.run(run, method, (parts[microbatch].batch, *extra), seed, recorder, microbatch)

        def flows(stage: int, microbatch: int) -> Sequence[Flow]:
            return traces[microbatch].blocks[plan.first_block(stage)].flows if stage else ()

        self.runner.run(schedule, compute, flows)

    @property
    def _splits_backward(self) -> bool:
        schedule = self.options.schedule_of(self.ranks, 1)
        return any(action.kind is Kind.BACKWARD_INPUT for rank in schedule.actions for action in rank)

    def _put_off(self, backward: Callable[[], None]) -> Callable[[], None]:
        backward()
        return self.deferred.take()

    # ---- traces ---------------------------------------------------------------------------------------------------

    def _trace(self, method: str, part: Microbatch, extra: Sequence[Any]) -> Trace:
        """Return the trace of a step with a microbatch of this shape."""
        key = (method, self.module.training, signature(part.batch))
        if key not in self._traces:
            with self._whole():
                self._traces[key] = trace_step(
                    self.module,
                    self.blocks,
                    method,
                    (part.batch, *extra),
                    self._shapes,
                    self.device,
                    self._context,
                )
        return self._traces[key]

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        self._tracing = True
        try:
            with (
                contextlib.nullcontext() if self.partition is None else self.partition.whole(),
                contextlib.nullcontext() if self._tensor is None else self._tensor.suspended(),
            ):
                yield
        finally:
            self._tracing = False

    def _flags(self) -> list[bool]:
        return [p.requires_grad for p in self.module.parameters()]

    def check_unchanged(self) -> None:
        """Refuse parameters that were frozen or unfrozen since the model was cut.

        Raises:
            PipelineError: Some were.

        """
        if self._flags() != self._trainable_flags:
            raise PipelineError(
                "Parameters were frozen or unfrozen after the first batch, which a pipeline cannot follow: do it "
                "before `fit`, or train with `strategy='commopt'`."
            )
