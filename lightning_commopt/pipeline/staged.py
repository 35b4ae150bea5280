"""A user's module in stages, from its first batch to the end of a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_commopt.pipeline.bubble_report import bubble_report
from lightning_commopt.pipeline.engine import Engine, EngineOptions
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.groups import PipelineGroups, SharedGroups
from lightning_commopt.pipeline.materialise import is_on_meta, materialise
from lightning_commopt.pipeline.measured import typical_step
from lightning_commopt.pipeline.metrics import StagedMetrics
from lightning_commopt.pipeline.partition import Partition
from lightning_commopt.pipeline.recording import StepRecorder, log_again
from lightning_commopt.pipeline.replay import replay
from lightning_commopt.pipeline.state import ScatteredState
from lightning_commopt.pipeline.tensor_parallel import TensorParallel
from lightning_commopt.pipeline.weights import align, collect, part

__all__ = ["StagedModel"]


class StagedModel:
    """Runs the user's steps in stages, and hands out what they log, return and learn as one process would.

    Making one, and every method but :meth:`counts_here`, is a collective of all ranks.

    Args:
        module: The whole model, on the CPU.
        blocks: Names of its blocks.
        options: What the user chose.
        groups: The process groups.
        device: Where this rank computes.
        context: Is entered around the user's step: autocast.
        seed: Of random numbers in steps, the same on all ranks of a pipeline.

    Attributes:
        engine: This rank's part of the pipeline.
        settled: Whether it is known which stages need the parameters outside of blocks.
        places: The ranks of the pipeline that hold each parameter, ascending, by name; the first one speaks for it.
        tensor: What divides matrices, if they are.
        parted: Whether the module was made on the meta device: it is never whole on any rank, nor after the run.

    """

    def __init__(
        self,
        module: "pl.LightningModule",
        blocks: Sequence[str],
        options: EngineOptions,
        groups: PipelineGroups,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        seed: int,
    ) -> None:
        self._module, self._groups, self._device = module, groups, device
        self.engine = Engine(module, blocks, options, groups.pipeline, device, context, seed)
        self.settled = False
        self.parted = is_on_meta(module)
        self.places: dict[str, tuple[int, ...]] = {}
        self._shared = SharedGroups({}, {})
        self._names: dict[int, str] = {}
        self._metrics: StagedMetrics | None = None
        self.tensor: TensorParallel | None = None
        self._evaluated = 0

    @property
    def partition(self) -> Partition:
        """The stages of this rank in the module, which was cut."""
        assert self.engine.partition is not None
        return self.engine.partition

    @property
    def kept(self) -> set[int]:
        """Identities of this rank's parameters."""
        return set(self._names)

    def counts_here(self, parameter: Tensor) -> bool:
        """Return whether this rank counts a parameter in the norm of the whole model."""
        name = self._names.get(id(parameter))
        if name is None or not self._shared.counts_here(name, self._groups.place):
            return False
        return self.tensor is None or self.tensor.counts(name)

    # ---- taking apart ---------------------------------------------------------------------------------------------

    def cut(self, method: str, batch: Any, extra: Sequence[Any], *, aligned: bool = False) -> None:
        """Keep this rank's blocks alone, with the same values on all replicas.

        Args:
            method: Name of the step that is run first.
            batch: Its first batch.
            extra: Its further arguments.
            aligned: Whether ranks have their values from an earlier run, each its own.

        """
        engine, groups = self.engine, self._groups
        engine.cut(method, batch, extra)
        self._metrics = StagedMetrics(
            self._module, engine.last_rank, groups.control, groups.data, lambda: engine.in_step
        )
        if not aligned:
            align(engine, groups)

    def settle(self, method: str, batch: Any, extra: Sequence[Any]) -> dict[str, tuple[int, ...]]:
        """Keep those parameters outside of blocks that this rank needs.

        Returns:
            The stages that need each parameter, by name.

        """
        engine = self.engine
        owners = engine.settle(method, batch, extra)
        self.places = {name: tuple(sorted({engine.placement[s] for s in of})) for name, of in owners.items()}
        self._shared = self._groups.shared(self.places)
        names = self.partition.first_names
        self._names = {id(p): names[id(p)] for p in self.partition.owned.values()}
        self.settled = True
        return owners

    def divide(self) -> None:
        """Keep this rank's part of matrices, if that was chosen; they must have their values."""
        plan, group = self.engine.options.plan, self._groups.tensor
        if plan is not None and group is not None and self.tensor is None:
            self.tensor = TensorParallel(plan, group, self.engine.deferred.linear)
            self.engine.divide(self.tensor)

    def materialise(self, seed: int, state: Mapping[str, Tensor] | None) -> list[str]:
        """Give values to what is here of a module that was made on the meta device.

        Args:
            seed: The same on all ranks.
            state: A state dict of the whole module to take values from.

        Returns:
            The names of what had none.

        Raises:
            PipelineError: On every rank: a module cannot initialise what it has.

        """
        groups, born, problem = self._groups, list[str](), ""
        try:
            born = materialise(
                self._module, self.partition.first_names, self._device, seed, state, self.partition.dummies
            )
        except PipelineError as error:
            problem = str(error)
        if problems := list(filter(None, groups.control.all_gather(problem))):
            raise PipelineError(problems[0])
        tensors = dict(self._module.named_parameters(remove_duplicate=False)) | dict(self._module.named_buffers())
        for name in born:
            if groups.replicas > 1:  # devices of another kind draw other numbers
                dist.broadcast(tensors[name].data, group=groups.data, group_src=0)
            if (group := self._shared.group_of(name)) is not None:
                dist.broadcast(tensors[name].data, group=group, group_src=0)
        return born

    # ---- steps ----------------------------------------------------------------------------------------------------

    def train(self, batch: Any, extra: Sequence[Any], scale: Tensor | float, number: int, *, fill: bool) -> Any:
        """Run all microbatches forwards and backwards.

        Args:
            batch: The whole one.
            extra: Further arguments of the step.
            scale: Factor on the loss to run backward on.
            number: Of the batch in the run.
            fill: Whether parameters without a gradient get zeros.

        Returns:
            What the step returned, with a loss that gives gradients when asked.

        """
        engine = self.engine
        gradients, recorder = engine.train(batch, extra, scale, number)
        for place, (name, parameter) in enumerate(engine.trainable.items()):
            group = self._shared.group_of(name)
            if gradients[place] is None and (fill or group is not None):
                gradients[place] = torch.zeros_like(parameter)
            if group is not None:
                dist.all_reduce(gradients[place], group=group)
        output = self._relayed(recorder)
        loss = output["loss"] if isinstance(output, dict) else output
        parameters: list[Tensor] = list(engine.trainable.values())
        if not parameters:
            parameters, gradients = [torch.zeros((), requires_grad=True)], [None]
        proxy = replay(loss.to(self._device), parameters, gradients, scale)
        return {**output, "loss": proxy} if isinstance(output, dict) else proxy

    def evaluate(self, method: str, batch: Any, extra: Sequence[Any]) -> Any:
        """Run all microbatches forwards, and return what the step returned."""
        self._evaluated += 1
        return self._relayed(self.engine.evaluate(method, batch, extra, self._evaluated))

    def align_gradients(self) -> None:
        """Take the gradients of shared parameters from the first rank that holds them.

        The means over replicas of a shared parameter may differ between stages in the last bit, or much, and so may
        those of a parameter that is not divided between the ranks that divide others.
        """
        for name, parameter in self.engine.trainable.items():
            if self.tensor is not None and parameter.grad is not None and name not in self.tensor.splits:
                dist.broadcast(parameter.grad, group=self._groups.tensor, group_src=0)
            if (group := self._shared.group_of(name)) is not None and parameter.grad is not None:
                dist.broadcast(parameter.grad, group=group, group_src=0)

    def bubble(self) -> str:
        """Return what the bubble of the last steps was, and how it would be smaller; empty before any was timed."""
        engine, options = self.engine, self.engine.options
        typical = typical_step(self._groups.control.all_gather(engine.timer.steps()))
        if typical is None:
            return ""
        microbatches, measured = typical
        schedule = options.schedule_of(engine.ranks, microbatches)
        cuts = self.partition.plan.cuts
        return bubble_report(options.schedule, schedule, measured, cuts, engine.costs, engine.places)

    def _relayed(self, recorder: StepRecorder) -> Any:
        """Log on every rank what the last stage logged, and return what it returned."""
        engine = self.engine
        payload = (recorder.logged(), recorder.output()) if engine.is_last else None
        on_cpu = move_data_to_device(payload, torch.device("cpu"))
        told = self._groups.control.broadcast(on_cpu, engine.last_rank)
        assert told is not None
        logged, output = told
        log_again(self._module, logged, has_state=engine.is_last)
        return move_data_to_device(output, self._device)

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module on the first rank of the pipeline, and nothing elsewhere."""
        return self.scattered().state_dict()

    def scattered(self) -> ScatteredState:
        """Return where the state of the module is. Not a collective."""
        engine = self.engine
        places = {key: engine.placement[stage] for key, stage in engine.state_owners().items()}
        cuts = self.partition.plan.cuts
        return ScatteredState(self._module, self.partition.state_keys, places, cuts, self._groups, self.tensor)

    def close(self, *, alone: bool) -> None:
        """Give the module its weights back, on the CPU of every rank, or of this rank alone if it is ``parted``.

        Args:
            alone: Whether other ranks cannot be asked; what they have becomes NaN, and this is not a collective.

        """
        if self._metrics is not None:
            self._metrics.close()
        if self.tensor is not None:
            self.tensor.abandon() if alone else self.tensor.unshard()
        if self.parted:
            part(self.engine)
        elif self.engine.partition is not None:
            collect(self.engine, self._groups, alone=alone)
