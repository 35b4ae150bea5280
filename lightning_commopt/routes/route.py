"""The contract of a route: how encoded buckets travel."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commopt.compression import BucketLayout, Compression, Context, ErrorFeedback, Scratch, kernels
from lightning_commopt.compression.pending import PendingBuffer
from lightning_commopt.measure import Recorder, Traffic
from lightning_commopt.routes.message import MessageFormat, MessageRows
from lightning_commopt.routes.transport import Transport, Travelling

__all__ = ["Parcel", "Route"]


@dataclass
class Parcel:
    """One bucket on its way.

    Args:
        layout: Where parameters lie in the bucket.
        start: Packed offset of the first value: 0, or that of this rank's shard where a node shares the bucket.
        method: How they are encoded.
        dtype: Type of the bucket's gradients; exact parameters travel in it.
        values: fp32, shape ``(n,)``: gradient plus residual; the route leaves the new residual here.
        exact: Shape ``(e,)``: the exact gradients.
        flags: uint8, shape ``(P,)``: ``PRESENT`` and ``NONFINITE`` of each parameter.
        second: The residual of the chunk that this rank owns, on routes where an owner encodes a mean.
        mean: fp32, shape ``(n,)``: to be written, the same bits on every rank.
        exact_mean: Shape ``(e,)``: likewise for the exact parameters.
        flags_any: uint8, shape ``(P,)``: to be written, flags set on any rank.
        state: The method's own tensors of this bucket.
        lane: Which set of messages it travels in, from 0 to below :attr:`Route.lanes`; no other parcel that is under
            way has the same.

    """

    layout: BucketLayout
    start: int
    method: Compression
    dtype: torch.dtype
    values: Tensor
    exact: Tensor
    flags: Tensor
    second: ErrorFeedback | None
    mean: Tensor
    exact_mean: Tensor
    flags_any: Tensor
    state: dict[str, PendingBuffer]
    lane: int


class Route(ABC):
    """Takes every rank's parcel to every rank's mean: encodes, exchanges, decodes, and adds in rank order.

    Args:
        transport: Issues the collectives.
        scratch: Working memory.
        recorder: Times encode, collective and decode.

    """

    second_hop: ClassVar[bool] = False
    """Whether a rank owns a chunk, encodes its mean again, and keeps that residual."""

    def __init__(self, transport: Transport, scratch: Scratch, recorder: Recorder) -> None:
        self.transport = transport
        self.scratch = scratch
        self.recorder = recorder
        self._formats: dict[tuple[BucketLayout, int, Compression, int], MessageFormat] = {}
        self._views: dict[tuple[str, MessageFormat], MessageRows] = {}

    @property
    def lanes(self) -> int:
        """Parcels that may be under way together, counting the one that is being encoded."""
        return 1

    @property
    def owners(self) -> int:
        """Chunks that a bucket is cut into."""
        return self.transport.world if self.second_hop else 1

    @abstractmethod
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        """Return the bytes that this rank sends for a parcel; they depend on sizes alone."""

    @abstractmethod
    def exchange(self, parcel: Parcel, round: int) -> Iterator[None]:
        """Carry a parcel, and yield whenever its messages are on their way, so that another may be worked on.

        Every rank does this for the same buckets in the same order. ``values``, ``exact`` and ``flags`` are done with
        when it yields first or ends.
        """

    def format(self, parcel: Parcel, round: int) -> MessageFormat:
        """Return the sizes of a parcel's messages: one for each owner of a chunk, as long as the longest."""
        key = parcel.layout, parcel.start, parcel.method, round % 2
        if key not in self._formats:
            chunk, exact = len(parcel.values) // self.owners, len(parcel.exact) // self.owners
            contexts = (self.context(parcel, owner * chunk, round, hop=1) for owner in range(self.owners))
            payload = max(parcel.method.payload_bytes(chunk, context) for context in contexts)
            self._formats[key] = MessageFormat(len(parcel.flags), exact, parcel.dtype, payload)
        return self._formats[key]

    def travel(self, begin: Callable[..., Travelling], *rows: Tensor) -> Iterator[None]:
        """Begin a collective, yield while it is under way, and return when it is through."""
        begun = self.recorder.clock.mark()
        travelling = begin(*rows)
        nbytes = self.transport.issued[-1].sent_bytes
        yield
        awaited = travelling.wait()
        self.recorder.arrived(begun, nbytes, awaited=awaited)

    def messages(self, name: str, count: int, form: MessageFormat) -> MessageRows:
        """Return ``count`` messages in the working memory ``name``, content undefined."""
        rows = self.scratch.get(name, (count, form.row_bytes), torch.uint8)
        views = self._views.get((name, form))
        if views is None or views.rows is not rows:
            views = self._views[name, form] = form.view(rows)
        return views

    def context(self, parcel: Parcel, offset: int, round: int, hop: int) -> Context:
        """Return what a method may know of the chunk that begins ``offset`` values into the parcel."""
        start = parcel.start + offset
        return Context(parcel.layout, start, round, self.transport.rank, hop, self.scratch, parcel.state)


def sum_in_rank_order(rows: Tensor, out: Tensor) -> None:
    """Write the sum over rows of shape ``(R, n)`` into ``out`` of shape ``(n,)``, row after row, in ``out``'s dtype."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)


def merge(form: MessageFormat, got: MessageRows, flags: Tensor, exact: Tensor) -> None:
    """Write the bitwise or of the flags and the mean of the exact gradients of everybody's messages."""
    share = 1 / len(got.rows)
    if packing := kernels.packing_for(exact) if form.exact_dtype == torch.float32 else None:
        packing.merge(got.rows.numpy(), form.exact_at, share, flags.numpy(), exact.numpy())
        return
    merge_flags(got.flags, flags)
    sum_in_rank_order(got.exact, exact)
    exact.mul_(share)


def merge_flags(rows: Tensor, out: Tensor) -> None:
    """Write the bitwise or over rows of shape ``(R, P)`` into ``out``."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.bitwise_or_(row)


def add_residual(values: Tensor, residual: ErrorFeedback | None) -> Tensor:
    """Return packed values plus residual, to be encoded in place; without error feedback the values."""
    if residual is None:
        return values
    if residual.settled:
        return residual.compensate_all(lambda old, out: torch.add(old, values, out=out))
    return residual.compensate(lambda span, old, out: torch.add(old, values[span.buffer], out=out))
