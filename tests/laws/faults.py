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
    "dropped_chunk",
    "early_commit",
    "forgotten_residual",
    "forgotten_state",
    "lost_element",
    "other_order",
    "own_value",
    "planted",
    "raising_rank",
    "scaled_units",
    "short_message",
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


def dropped_chunk() -> None:
    """The second half of what arrives is not decoded."""
    decode = BlockQuantization.decode

    def drop(self: BlockQuantization, payload: Tensor, out: Tensor, context: Context, *, add: bool = False) -> None:
        whole = out.clone()
        decode(self, payload, whole, context, add=add)
        out[: len(out) // 2] = whole[: len(out) // 2]

    BlockQuantization.decode = drop  # type: ignore[method-assign,assignment]


def short_message() -> None:
    """The last byte of every message stays at home."""
    exchange = GlooTransport._exchange

    def short(self: GlooTransport, send: Sequence[Tensor], receive: Tensor) -> Travelling:
        got = receive[:, :-1].contiguous()
        exchange(self, [row[:-1].contiguous() for row in send], got).wait()
        receive[:, :-1] = got
        return Travelling()

    GlooTransport._exchange = short  # type: ignore[method-assign]


def other_order() -> None:
    """Rank 1 issues the collectives of a round by another name."""
    issue = GlooTransport._issue

    def renamed(self: GlooTransport, name: str, sent_bytes: int) -> None:
        issue(self, name + "_coalesced" * (dist.get_rank() == 1), sent_bytes)

    GlooTransport._issue = renamed  # type: ignore[method-assign,assignment]


def forgotten_state() -> None:
    """A checkpoint's residuals are not taken."""
    gradient_path.GradientPath.load_state = lambda self, state: None  # type: ignore[method-assign]


def raising_rank() -> None:
    """Rank 1 cannot encode."""
    encode = BlockQuantization.encode

    def fail(self: BlockQuantization, values: Tensor, payload: Tensor, context: Context) -> None:
        if dist.get_rank() == 1:
            raise ArithmeticError("no such instruction")
        encode(self, values, payload, context)

    BlockQuantization.encode = fail  # type: ignore[method-assign]
