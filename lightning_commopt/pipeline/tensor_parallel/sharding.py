"""A model of which each rank holds a part of the matrices."""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt.pipeline.deferred_linear import is_conv1d, linear
from lightning_commopt.pipeline.tensor_parallel.collectives import CopyToRanks, sum_over_ranks
from lightning_commopt.pipeline.tensor_parallel.plan import Column, Row, TensorParallelPlan, around, can_divide
from lightning_commopt.pipeline.tensor_parallel.split import Split

__all__ = ["LinearFunction", "TensorParallel"]


class LinearFunction(Protocol):
    """As :func:`lightning_commopt.pipeline.deferred_linear.linear`."""

    def __call__(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Return ``inputs @ weight.T + bias``."""


class TensorParallel:
    """Divides a model among the ranks of a group, in place (https://arxiv.org/abs/1909.08053).

    Parameters stay the same objects, so that optimizers remain valid; their ``data`` shrinks. Column
    layers with a common input cost an all-reduce of its gradient in the backward, a row layer one of its output in the
    forward. What is not divided is computed on every rank, with equal results.

    Dropout between a column and a row layer has the same mask on all ranks if their generators are seeded alike.

    Args:
        plan: Which layers are divided.
        group: The ranks that divide a model.
        linear: What a divided layer computes with, :meth:`DeferredWeights.linear` to put off its weight's gradient.

    """

    def __init__(self, plan: TensorParallelPlan, group: dist.ProcessGroup, linear: LinearFunction = linear) -> None:
        self._plan = plan
        self._group = group
        self._linear = linear
        self._copied = CopyToRanks(group)
        self._layers: list[nn.Module] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._divided: dict[tuple[nn.Module, str], int] = {}
        self.splits: dict[str, Split] = {}

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        return dist.get_rank(self._group)

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the model."""
        return dist.get_world_size(self._group)

    def shard(self, module: nn.Module) -> None:
        """Keep this rank's part of each layer of the plan. All ranks must hold the same values before.

        Args:
            module: The model, or what a pipeline stage holds of it; :meth:`TensorParallelPlan.check` the whole before.

        Raises:
            ValueError: A layer of the plan has a ``forward`` of its own, such as that of installed deferred weights.

        """
        for name, layer in module.named_modules():
            if self._plan.kind(name) is not None and "forward" in vars(layer):
                raise ValueError(f"`{name}.forward` was replaced: divide the model first, or take it out of the plan.")
        for name, layer in list(module.named_modules()):
            kind = self._plan.kind(name)
            if kind is not None and can_divide(layer):
                self._shard_layer(name, layer, kind)
                self._divide_sizes(around(module, name), kind.sizes if isinstance(kind, Column) else ())

    def unshard(self) -> None:
        """Make the model whole again on every rank. A collective."""
        for name, parameter in self._parameters.items():
            parameter.data = self.full(name, parameter.data)
        self._forget()

    def abandon(self) -> None:
        """Give the model its form back where other ranks cannot be asked: what was divided becomes NaN."""
        for name, parameter in self._parameters.items():
            lost = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
            parameter.data = lost.expand(self._shapes[name])
        self._forget()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let layers compute as in the whole model. Whoever runs them puts whole parameters in their places."""
        forwards = [layer.__dict__.pop("forward") for layer in self._layers]
        for (module, attribute), whole in self._divided.items():
            setattr(module, attribute, whole)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, forwards, strict=True):
                layer.forward = forward
            for (module, attribute), whole in self._divided.items():
                setattr(module, attribute, whole // self.ranks)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a divided parameter, or of a tensor of its shape such as optimizer state. A collective.

        Other tensors are returned as they are.
        """
        if not self.is_divided(name, tensor):
            return tensor
        pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(pieces, tensor.contiguous(), group=self._group)
        return self.splits[name].join(pieces)

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that belongs to a divided parameter; others as they are."""
        split = self.splits.get(name)
        if split is None or tensor.shape != self._shapes[name]:
            return tensor
        return split.take(tensor, self.rank, self.ranks)

    def is_divided(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor is this rank's part of a parameter, or of state of its shape."""
        return name in self.splits and tensor.shape == self._parameters[name].shape

    def counts(self, name: str) -> bool:
        """Return whether this rank's elements of a parameter count in a sum over the ranks, such as that of a norm."""
        return name in self.splits or self.rank == 0

    def _shard_layer(self, name: str, layer: Any, kind: Column | Row) -> None:
        outputs, inputs = (1, 0) if is_conv1d(layer) else (0, 1)
        if isinstance(kind, Row):
            self._keep(f"{name}.weight", layer.weight, Split(inputs))
        else:
            self._keep(f"{name}.weight", layer.weight, Split(outputs, kind.parts))
            if layer.bias is not None:
                self._keep(f"{name}.bias", layer.bias, Split(0, kind.parts))
        layer.forward = MethodType(self._column if isinstance(kind, Column) else self._row, layer)
        self._layers.append(layer)

    def _forget(self) -> None:
        for layer in self._layers:
            del layer.forward
        for (module, attribute), whole in self._divided.items():
            setattr(module, attribute, whole)
        for kept in (self._layers, self._divided, self._parameters, self._shapes, self.splits):
            kept.clear()

    def _divide_sizes(self, module: nn.Module, attributes: tuple[str, ...]) -> None:
        for attribute in attributes:
            if (module, attribute) not in self._divided:
                whole = self._divided[module, attribute] = getattr(module, attribute)
                setattr(module, attribute, whole // self.ranks)

    def _keep(self, name: str, parameter: nn.Parameter, split: Split) -> None:
        self._shapes[name] = parameter.shape
        parameter.data = split.take(parameter.data, self.rank, self.ranks)
        self.splits[name] = split
        self._parameters[name] = parameter

    def _column(self, layer: Any, inputs: Tensor) -> Tensor:
        return self._linear(self._copied(inputs), layer.weight, layer.bias, transposed=is_conv1d(layer))

    def _row(self, layer: Any, inputs: Tensor) -> Tensor:
        part = self._linear(inputs, layer.weight, None, transposed=is_conv1d(layer))
        total = sum_over_ranks(part, self._group)
        return total if layer.bias is None else total + layer.bias.to(total.dtype)
