"""A loss whose backward hands out gradients that were computed before."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["replay"]


def replay(
    loss: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: Tensor | float
) -> Tensor:
    """Return a loss that depends on parameters.

    Lightning sets gradients to zero between the step and its backward. So a pipeline keeps what it computed, and this
    loss gives it back to whoever runs backward: hooks, accumulation, a gradient scaler and DDP find what they expect.

    Args:
        loss: Its value, 0-d.
        parameters: Trainable ones.
        gradients: Of ``factor`` times the loss, by parameter. They are used up.
        factor: With which backward is expected to be called; it makes no multiplication then.

    """
    proxy: Tensor = _Replay.apply(loss, list(gradients), factor, *parameters)  # type: ignore[no-untyped-call]
    return proxy


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], factor: Any, *parameters: Tensor) -> Tensor:
        ctx.gradients, ctx.factor = gradients, factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("The loss of a pipeline step can run backward once only.")
        known = [g for g in gradients if g is not None]
        if known:
            torch._foreach_mul_(known, gradient / ctx.factor)
        return None, None, None, *gradients
