"""What one run of a step under fake tensors tells about a model: nothing is computed, nothing is allocated."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lightning_commopt.pipeline.dataflow import Dataflow
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.refusals import in_checkpoint, in_reentrant_checkpoint
from lightning_commopt.pipeline.sandbox import isolated_randomness, muted_logging, saved_metrics

__all__ = ["BlockTrace", "Flow", "Passed", "Shape", "Tensors", "Trace", "trace_step"]

Tensors = Mapping[str, "Shape"]


class Shape(NamedTuple):
    """What a tensor is without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """Return the shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Flow(NamedTuple):
    """A tensor that enters a block and depends on blocks before it.

    Args:
        position: Among the leaves of the block's ``(args, kwargs)``.
        source: Among the leaves of what the block before it returned, if it is one of those.
        tensor: Its shape; ``requires_grad`` tells whether a gradient goes back.

    """

    position: int
    source: int | None
    tensor: Shape


class Passed(NamedTuple):
    """An output of a block that is one of its arguments, which does not depend on other blocks."""

    position: int


@dataclass
class BlockTrace:
    """What was seen of one block, and of what follows it until the next one.

    Args:
        flows: What enters it from blocks before it.
        structure: Of what it returns.
        outputs: The leaves of what it returns: a `Shape`, a :class:`Passed`, or the object itself.
        flops: Of its forward.
        activation_bytes: What is kept for its backward.
        used: Names of parameters on which it depends.

    """

    flows: tuple[Flow, ...] = ()
    structure: TreeSpec | None = None
    outputs: tuple[Any, ...] = ()
    flops: int = 0
    activation_bytes: int = 0
    used: set[str] = field(default_factory=set)


@dataclass
class Trace:
    """What was seen of a step.

    Args:
        blocks: By block. The step's part before the first block belongs to that, its end to the last.
        uncuttable: Before which blocks there can be no cut, and why.
        callers: In which block each module was called first, by name.

    """

    blocks: list[BlockTrace]
    uncuttable: dict[int, str] = field(default_factory=dict)
    callers: dict[str, int] = field(default_factory=dict)


def trace_step(
    module: nn.Module,
    blocks: Sequence[str],
    method: str,
    arguments: Sequence[Any],
    parameters: Tensors,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Trace:
    """Run a step of a module with fake parameters, and write down what its blocks exchange.

    The inputs are real, so that Python code may look at their values; whatever depends on a parameter is fake.

    Args:
        module: The whole model; its parameters may be empty.
        blocks: Names of its blocks.
        method: Name of the step, such as ``"training_step"``.
        arguments: Of the step.
        parameters: Shapes of all parameters by name.
        device: Where they are to be.
        context: Is entered around the step.

    Raises:
        PipelineError: Blocks are not called once each, in order, or their inputs cannot be known.

    """
    observer = _Observer(module, blocks, method)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.enable_grad() if method == "training_step" else torch.no_grad():
        tensors = _fake_tensors(module, parameters, device, fake_mode)
        observer.flow.name(tensors, parameters)
        arguments = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, tuple(arguments))
        with (
            saved_metrics(module),
            muted_logging(module, observer.see_logged),
            isolated_randomness(device),
            _reparametrize_module(module, tensors),
            observer.watching(),
            context(),
        ):
            observer.run(arguments)
    return observer.finish()


def _fake_tensors(
    module: nn.Module, parameters: Tensors, device: torch.device, mode: FakeTensorMode
) -> dict[str, Tensor]:
    """Return a fake for every parameter, the same for tied ones, and a copy of every buffer."""
    fakes: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in fakes:
            shape = parameters[name]
            with mode:
                fake = torch.empty(shape.shape, dtype=shape.dtype, device=device)
            fakes[id(parameter)] = fake.requires_grad_(parameter.requires_grad)
        tensors[name] = fakes[id(parameter)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_meta:
            with mode:
                tensors[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        else:
            tensors[name] = buffer.detach().to(device, copy=True)
    return tensors


class _Flops(TorchDispatchMode):
    """Counts floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


class _Observer:
    """Sees the calls of blocks."""

    def __init__(self, module: nn.Module, blocks: Sequence[str], method: str) -> None:
        self._module, self._blocks, self._method = module, blocks, method
        self.flow = Dataflow()
        self._flops = _Flops()
        self._trace = Trace([BlockTrace() for _ in blocks])
        self._begun = self._ended = 0
        self._flops_before = 0
        self._outputs: list[Any] = []
        self._arguments: list[Any] = []
        self._saved: set[int] = set()
        self._names = {id(m): name for name, m in module.named_modules()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch blocks, operations and what is kept for backward."""
        handles = []
        for index, name in enumerate(self._blocks):
            block = self._module.get_submodule(name)
            enter = lambda m, args, kwargs, index=index: self._enter(index, args, kwargs)  # noqa: E731
            leave = lambda m, args, kwargs, out, index=index: self._leave(index, out)  # noqa: E731
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave, with_kwargs=True))
        for module in self._module.modules():
            if module is not self._module:
                handles.append(module.register_forward_pre_hook(self._called))
        saved = torch.autograd.graph.saved_tensors_hooks(self._count_saved, lambda tensor: tensor)
        try:
            with saved, self._flops, self.flow:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, arguments: Sequence[Any]) -> None:
        """Run the step; once all blocks were left, its end may fail for want of values."""
        try:
            returned = getattr(self._module, self._method)(*arguments)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if self._ended < len(self._blocks):
                where = f"block `{self._blocks[self._begun - 1]}`" if self._begun else "what precedes the first block"
                raise PipelineError(
                    f"In `{self._method}`, {where} needs the value of something computed from parameters "
                    f"(`{error.func}`), and shapes after it cannot be known in advance: a pipeline cannot run it."
                ) from error
        except Exception:
            if self._ended < len(self._blocks):
                raise
        else:
            self._use(tree_flatten(returned)[0])

    def see_logged(self, value: Any) -> None:
        """A logged value is needed where the step ends."""
        self._trace.blocks[-1].used |= self.flow.parameters_of([value])

    def finish(self) -> Trace:
        """Return what was seen."""
        if self._begun < len(self._blocks):
            missing = self._blocks[self._begun]
            raise PipelineError(
                f"Block `{missing}` was not called in `{self._method}`: every block must be called once in each step, "
                "in order. Name others with `blocks=[...]`."
            )
        self._end_segment()
        for index, used in self.flow.used.items():
            self._trace.blocks[index].used |= used
        for origin, index, what in self.flow.skips:
            for cut in range(origin + 1, index + 1):
                self._trace.uncuttable.setdefault(
                    cut,
                    f"what block `{self._blocks[origin]}` makes is used {what} of block `{self._blocks[index]}`, and "
                    "not handed from block to block",
                )
        return self._trace

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def _enter(self, index: int, args: Any, kwargs: Any) -> Any:
        self._check_order(index)
        if index:
            self._end_segment()
        self._begun = index + 1
        self._arguments, structure = tree_flatten((args, kwargs))
        flows = [] if index == 0 else self._cut(index)
        self.flow.enter(index)
        self._use(self._arguments)
        for flow in flows:
            self._arguments[flow.position] = self.flow.replaced(self._arguments[flow.position])
        self._trace.blocks[index].flows = tuple(flows)
        return tree_unflatten(self._arguments, structure)

    def _cut(self, index: int) -> list[Flow]:
        """Return what enters a block from blocks before it."""
        flows = []
        for position, leaf in enumerate(self._arguments):
            if isinstance(leaf, Tensor) and self.flow.origin_of(leaf) is not None:
                source = next((i for i, out in enumerate(self._outputs) if out is leaf), None)
                flows.append(Flow(position, source, Shape.of(leaf)))
        if not flows:
            self._trace.uncuttable[index] = (
                f"block `{self._blocks[index]}` gets nothing from the blocks before it as an argument"
            )
        if in_checkpoint() and any(flow.source is None for flow in flows):
            self._trace.uncuttable[index] = (
                f"block `{self._blocks[index]}` runs under activation checkpointing with inputs that are computed "
                "between blocks"
            )
        return flows

    def _leave(self, index: int, output: Any) -> None:
        leaves, structure = tree_flatten(output)
        outputs: list[Any] = []
        for leaf in leaves:
            place = next((i for i, a in enumerate(self._arguments) if a is leaf and isinstance(a, Tensor)), None)
            if place is not None and self.flow.origin_of(leaf) is None:
                outputs.append(Passed(place))
            elif isinstance(leaf, Tensor):
                self.flow.made_by_block(leaf)
                outputs.append(Shape.of(leaf))
            else:
                outputs.append(leaf)
        block = self._trace.blocks[index]
        block.structure, block.outputs = structure, tuple(outputs)
        self._outputs, self._ended = leaves, index + 1
        self.flow.leave()

    def _check_order(self, index: int) -> None:
        name = self._blocks[index]
        if in_reentrant_checkpoint():
            raise PipelineError(
                f"Block `{name}` runs under reentrant activation checkpointing, which hides its inputs: call "
                "`checkpoint(..., use_reentrant=False)` (`gradient_checkpointing_kwargs={'use_reentrant': False}` in "
                "transformers)."
            )
        if index < self._begun:
            raise PipelineError(
                f"Block `{name}` was called twice, or after `{self._blocks[self._begun - 1]}`, in one "
                f"`{self._method}`: blocks must be called once each, in order. Name others with `blocks=[...]`."
            )
        if index > self._begun:
            raise PipelineError(
                f"Block `{name}` was called before block `{self._blocks[self._begun]}` in `{self._method}`: blocks "
                "must be called once each, in order. Name them in their order with `blocks=[...]`."
            )

    # ---- what a segment costs and uses ----------------------------------------------------------------------------

    def _end_segment(self) -> None:
        self._trace.blocks[self._begun - 1].flops = self._flops.total - self._flops_before
        self._flops_before = self._flops.total

    def _use(self, values: Sequence[Any]) -> None:
        self.flow.used.setdefault(max(self._begun - 1, 0), set()).update(self.flow.parameters_of(values))

    def _called(self, module: nn.Module, args: Any) -> None:
        self._trace.callers.setdefault(self._names[id(module)], max(self._begun - 1, 0))

    def _count_saved(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._saved and not self.flow.is_parameter(tensor):
            self._saved.add(key)
            self._trace.blocks[max(self._begun - 1, 0)].activation_bytes += tensor.untyped_storage().nbytes()
        return tensor
