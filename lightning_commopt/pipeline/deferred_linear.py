"""Weight gradients of linear layers that are computed later than those of their inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["DeferredWeights", "is_conv1d", "linear"]


class _Pending(NamedTuple):
    weight: nn.Parameter
    inputs: Tensor
    grad_output: Tensor
    transposed: bool


class DeferredWeights:
    """Puts off the weight gradients of linear layers, so that a pipeline can compute them while it would wait.

    A backward through an installed layer computes the gradients of its input and bias and keeps what the gradient of
    its weight needs. :meth:`take` returns a function that computes it. All other layers stay as they are: splitting any
    graph in two loses gradients where its parts overlap.

    The gradients are those of a backward in one piece, and are added to ``.grad``. Hooks on the weights do not see
    them. Activation checkpointing without reentrance and autocast work; a second derivative does not.
    """

    def __init__(self) -> None:
        self._active = False
        self._pending: list[_Pending] = []
        self._installed: list[nn.Module] = []

    def install(self, module: nn.Module) -> None:
        """Change each ``nn.Linear`` (and ``Conv1D`` of transformers) in a module, itself included.

        Subclasses and layers with a ``forward`` of their own are left alone.
        """
        for layer in module.modules():
            if (type(layer) is nn.Linear or is_conv1d(layer)) and "forward" not in vars(layer):
                layer.forward = MethodType(self._forward, layer)  # a copy of the layer has a method of its own
                self._installed.append(layer)

    def remove(self) -> None:
        """Give all layers their own ``forward`` back."""
        for layer in self._installed:
            del layer.forward
        self._installed.clear()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Put off weight gradients of forwards in this context; their backwards must be in it, too.

        Raises:
            RuntimeError: At the end, some were not computed.

        """
        self._active = True
        try:
            yield
            if self._pending:
                raise RuntimeError(f"The gradients of `{len(self._pending)}` weights were put off and not computed.")
        finally:
            self._active = False
            self._pending.clear()

    def take(self) -> Callable[[], None]:
        """Return a function that computes what was put off since the last call, and adds it to ``.grad``."""
        pending, self._pending = self._pending, []

        def compute() -> None:
            while pending:
                _accumulate(pending.pop())

        return compute

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        """Do what :func:`linear` does, with the gradient of the weight put off."""
        deferred = (
            self._active and torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad
        )
        if not deferred:
            return linear(inputs, weight, bias, transposed=transposed)
        device = inputs.device.type
        if torch.is_autocast_enabled(device) and inputs.dtype is not torch.float64:
            inputs = inputs.to(torch.get_autocast_dtype(device))  # what is kept is as small as without deferring
        output: Tensor = _DeferredLinear.apply(inputs, weight, bias, transposed, self)  # type: ignore[no-untyped-call]
        return output

    def put_off(self, weight: nn.Parameter, inputs: Tensor, grad_output: Tensor, transposed: bool) -> None:
        """Keep what the gradient of a weight needs: inputs [..., in] and gradients of outputs [..., out]."""
        self._pending.append(_Pending(weight, inputs, grad_output, transposed))

    def _forward(self, layer: Any, inputs: Tensor) -> Tensor:
        return self.linear(inputs, layer.weight, layer.bias, transposed=is_conv1d(layer))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """Return ``inputs @ weight.T + bias``.

    Args:
        inputs: [..., in features].
        weight: [out features, in features], or the other way round if ``transposed``.
        bias: [out features].
        transposed: Whether the weight is that of a ``Conv1D``.

    """
    return F.linear(inputs, weight.t() if transposed else weight, bias)


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is a ``Conv1D`` of transformers: linear, with weight [in features, out features]."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, weights: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = (
            weight  # not saved as a tensor: checkpointing would hand back a copy, and `.grad` belongs to this one
        )
        ctx.transposed, ctx.weights = transposed, weights
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear(inputs, weight, bias, transposed=transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        ctx.weights.put_off(weight, inputs, grad_output, ctx.transposed)
        grad_inputs = grad_bias = None
        if ctx.needs_input_grad[0]:
            matrix = weight.t() if ctx.transposed else weight
            grad_inputs = grad_output @ matrix.to(grad_output.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _rows(grad_output).sum(0).to(ctx.bias_dtype)
        return grad_inputs, None, grad_bias, None, None


def _accumulate(pending: _Pending) -> None:
    weight, inputs, grad_output, transposed = pending
    with torch.no_grad():
        rows, grad_rows = _rows(inputs), _rows(grad_output)
        grad = rows.t() @ grad_rows if transposed else grad_rows.t() @ rows
        if weight.grad is None:
            weight.grad = grad.to(weight.dtype)
        else:
            weight.grad += grad


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])
