"""Faults that a law must see.

pool.run(planted, 3, forgotten_residual, function, *args)   # instead of pool.run(function, 3, *args)
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compression import Context, ErrorFeedback, Scratch
from lightning_commopt.compression.block_quantization import BlockQuantization
from lightning_commopt.routes import gradient_path
from lightning_commopt.routes.bucket import BucketState
from lightning_commopt.routes.transport import GlooTransport, Travelling

__all__ = [
    "early_commit",
    "forgotten_residual",
    "lost_element",
    "own_value",
    "planted",
    "scaled_units",
    "uncounted_message",
]

T = TypeVar("T")


def planted(fault: Callable[[], None], function: Callable[..., T], *args: object) -> T:
    """Call a function after a fault was planted; in a worker, whose process ends thereafter."""
    fault()
    return function(*args)


def forgotten_residual() -> None:
    """What a round dropped is not added to the next one."""
    _before_each_update(lambda residual: residual.final.zero_())


def _before_each_update(spoil: Callable[[ErrorFeedback], object]) -> None:
    """Do something to a residual before it is added, whichever way."""
    for name in ("update", "update_all"):
        update = getattr(ErrorFeedback, name)

        def spoiled(self: ErrorFeedback, write: object, update: Callable[..., Tensor] = update) -> Tensor:
            spoil(self)
            return update(self, write)

        setattr(ErrorFeedback, name, spoiled)


def own_value() -> None:
    """Rank 1 decodes other bits than the others."""
    unpack = gradient_path.unpack

    def inexact(
        kept: BucketState, mean: Tensor, exact_mean: Tensor, scale: Tensor | None, bucket: Tensor, keep_unused: bool
    ) -> None:
        unpack(kept, mean, exact_mean, scale, bucket, keep_unused)
        if dist.get_rank() == 1:
            bucket.mul_(1 + 2.0**-20)

    gradient_path.unpack = inexact


def lost_element() -> None:
    """The last element of every payload is sent as zero, and not owed."""
    encode = BlockQuantization.encode

    def lose(self: BlockQuantization, values: Tensor, payload: Tensor, context: Context) -> None:
        encode(self, values, payload, context)
        payload[-1:].zero_()

    BlockQuantization.encode = lose  # type: ignore[method-assign]


def uncounted_message() -> None:
    """A message travels that nobody counts."""
    exchange = GlooTransport._exchange

    def twice(self: GlooTransport, send: Sequence[Tensor], receive: Tensor) -> Travelling:
        exchange(self, send, receive.clone()).wait()
        return exchange(self, send, receive)

    GlooTransport._exchange = twice  # type: ignore[method-assign]


def early_commit() -> None:
    """What a round dropped is final before the step was applied."""
    _before_each_update(lambda residual: setattr(residual, "pending", residual.final))


def scaled_units() -> None:
    """Gradients and residuals are exchanged with the loss scale on them."""
    gather, unpack = gradient_path.gather, gradient_path.unpack

    def scaled(
        kept: BucketState,
        bucket: Tensor,
        flags: Sequence[int],
        scale: Tensor | None,
        scratch: Scratch,
        residual: ErrorFeedback | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gather(kept, bucket, flags, None, scratch, residual)

    def still_scaled(
        kept: BucketState, mean: Tensor, exact_mean: Tensor, scale: Tensor | None, bucket: Tensor, keep_unused: bool
    ) -> None:
        unpack(kept, mean, exact_mean, None, bucket, keep_unused)

    gradient_path.gather, gradient_path.unpack = scaled, still_scaled
