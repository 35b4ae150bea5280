"""Running one stage's part of the user's step.

Every stage runs the whole step. Blocks of earlier stages are stubs that return NaN; the first block of the stage gets
what the stage before it sent; the first block of the next stage ends the run, and its inputs are what is sent on.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.plan import Plan
from lightning_commopt.pipeline.sandbox import isolated_randomness, seed_all
from lightning_commopt.pipeline.trace import Passed, Shape, Trace

__all__ = ["Absent", "Position", "Recorder", "Slices", "StageRun"]


class Recorder(Protocol):
    """Keeps what the last stage logs and returns."""

    def log_of(self, microbatch: int, last: bool) -> Callable[..., None]:
        """Return what stands for ``self.log``."""

    def returned(self, microbatch: int, output: Any) -> Tensor | None:
        """Take what the step returned, and give the loss to run backward on."""


class _Stop(BaseException):
    """Ends a run at the first block of the next stage; the user's ``except Exception`` does not see it."""

    def __init__(self, flows: tuple[Tensor, ...]) -> None:
        self.flows = flows


class _Boundary(torch.autograd.Function):
    """Identity at the edge of a stage: not a view, so that it may be changed in place; its gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


@dataclass
class StageRun:
    """One microbatch on one stage.

    Args:
        stage: The stage.
        trace: Of the step with a microbatch of this shape.
        received: What the stage before sent.
        seed: Of the random numbers of this stage.

    """

    stage: int
    trace: Trace
    received: tuple[Tensor, ...]
    seed: int
    entered: bool = False


class Position:
    """Where the running stage is. One for a model.

    Args:
        plan: Where the model is cut.
        device: Where stubs make their outputs.

    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.run: StageRun | None = None

    def call(self, block: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Decide about a call of a block.

        Returns:
            Whether the block is to run here, and then its ``(args, kwargs)``, else what it returns.

        """
        run = self.run
        if run is None:
            return True, (args, kwargs)
        stage = self.plan.stage_of(block)
        if stage > run.stage:
            leaves, _ = tree_flatten((args, kwargs))
            raise _Stop(tuple(_leave(leaves[flow.position]) for flow in run.trace.blocks[block].flows))
        if stage < run.stage:
            return False, self._absent(run, block, args, kwargs)
        if block == self.plan.first_block(stage) and not run.entered:
            run.entered = True
            seed_all(run.seed)
            flows = run.trace.blocks[block].flows
            if stage and any(flow.source is None for flow in flows):
                leaves, structure = tree_flatten((args, kwargs))
                for flow, tensor in zip(flows, run.received, strict=True):
                    leaves[flow.position] = _enter(tensor)
                args, kwargs = tree_unflatten(leaves, structure)
        return True, (args, kwargs)

    def _absent(self, run: StageRun, block: int, args: Any, kwargs: Any) -> Any:
        """Return what a block of an earlier stage seems to return; the last one gives what was received."""
        seen = run.trace.blocks[block]
        leaves, _ = tree_flatten((args, kwargs))
        outputs = [
            leaves[o.position] if isinstance(o, Passed) else _nan(o, self.device) if isinstance(o, Shape) else o
            for o in seen.outputs
        ]
        if block + 1 == self.plan.first_block(run.stage):
            flows = run.trace.blocks[block + 1].flows
            if all(flow.source is not None for flow in flows):
                for flow, tensor in zip(flows, run.received, strict=True):
                    assert flow.source is not None
                    outputs[flow.source] = _enter(tensor)
        assert seen.structure is not None
        return tree_unflatten(outputs, seen.structure)


class Absent(nn.Module):
    """Stands for a block of another stage. It has no parameters; other attributes are those of the block.

    Args:
        block: The block.
        index: Its place.
        position: Where the running stage is.

    """

    def __init__(self, block: nn.Module, index: int, position: Position) -> None:
        super().__init__()
        self.training = block.training
        self.__dict__.update(_absent_block=block, _absent_index=index, _absent_position=position)

    def __getattr__(self, name: str) -> Any:
        block = self.__dict__.get("_absent_block")
        if block is None:
            raise AttributeError(name)
        return getattr(block, name)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index: int = self.__dict__["_absent_index"]
        local, result = self.__dict__["_absent_position"].call(index, args, kwargs)
        if local:
            raise PipelineError(
                "A block of another pipeline stage was called outside of a step. Only `training_step`, "
                "`validation_step`, `test_step` and `predict_step` can run the model."
            )
        return result


class Slices:
    """Runs stages of a model's steps.

    Args:
        module: The model, on which blocks of other ranks are :class:`Absent`.
        position: Where the running stage is.
        context: Is entered around the step.

    """

    def __init__(
        self, module: nn.Module, position: Position, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._module, self._position, self._context = module, position, context

    def run(
        self, run: StageRun, method: str, arguments: Sequence[Any], seed: int, recorder: Recorder, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Run one microbatch through one stage.

        Args:
            run: Which.
            method: Name of the step.
            arguments: Of the step.
            seed: Of random numbers before the first block of a stage, the same on all stages.
            recorder: Keeps what the last stage logs and returns.
            microbatch: Its place.

        Returns:
            What is sent on; of the last stage the loss, or nothing where the step returned none.

        """
        position = self._position
        last = run.stage == position.plan.stages - 1
        grad = torch.is_grad_enabled()
        attributes = self._module.__dict__
        attributes["log"] = recorder.log_of(microbatch, last)
        attributes["all_gather"] = _refuse_all_gather
        position.run = run
        try:
            with isolated_randomness(position.device), self._context():
                seed_all(seed)
                output = getattr(self._module, method)(*arguments)
                if not last:
                    raise PipelineError(f"`{method}` returned before it called all blocks, other than when traced.")
                loss = recorder.returned(microbatch, output)
                return () if loss is None else (loss,)
        except _Stop as stop:
            self._check(run, stop.flows)
            return stop.flows
        finally:
            position.run = None
            torch.set_grad_enabled(grad)  # a run may stop inside of `no_grad`
            attributes.pop("log", None)
            attributes.pop("all_gather", None)

    def _check(self, run: StageRun, flows: tuple[Tensor, ...]) -> None:
        """Check that what is sent is what the next stage expects."""
        block = self._position.plan.first_block(run.stage + 1)
        for flow, tensor in zip(run.trace.blocks[block].flows, flows, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (flow.tensor.shape, flow.tensor.dtype):
                raise PipelineError(
                    f"Block `{self._position.plan.blocks[block]}` was called with a tensor of shape "
                    f"{tuple(tensor.shape)} and {tensor.dtype}, and with {flow.tensor.shape} and {flow.tensor.dtype} "
                    "when traced: shapes must depend on the shapes of the batch alone."
                )


def _enter(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    entered: Tensor = _Boundary.apply(tensor)  # type: ignore[no-untyped-call]
    return entered


def _leave(tensor: Tensor) -> Tensor:
    return _enter(tensor.contiguous())


def _nan(shape: Shape, device: torch.device) -> Tensor:
    """Return a tensor without memory of its own that spoils whatever uses it."""
    value = float("nan") if shape.dtype.is_floating_point else 0
    return torch.full((), value, dtype=shape.dtype, device=device).expand(shape.shape)


def _refuse_all_gather(*args: Any, **kwargs: Any) -> None:
    raise PipelineError(
        "`self.all_gather` in a step of a pipeline would wait for other stages: gather in `on_*_epoch_end` instead."
    )
