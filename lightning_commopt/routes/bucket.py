"""What is kept for one bucket of DDP from round to round."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_commopt.compression import BucketLayout, Compression, ErrorFeedback, Parameter
from lightning_commopt.compression.kernels.kernel import COMPRESSED, COMPRESSED_GAP, EXACT, EXACT_GAP
from lightning_commopt.compression.layout import gaps_between
from lightning_commopt.compression.pending import Parts, PendingBuffer, spans_of
from lightning_commopt.routes.message import NONFINITE, PRESENT

__all__ = ["BucketState", "Share", "parameters_of", "parts_of"]


def parameters_of(names: Sequence[str], parameters: Sequence[Tensor], method: Compression) -> list[Parameter]:
    """Describe parameters for a layout; float64 travels exactly, since payloads and residuals are fp32."""
    return [
        Parameter(name, tuple(p.shape), method.travels_exactly(p.shape) or p.dtype == torch.float64)
        for name, p in zip(names, parameters, strict=True)
    ]


def parts_of(buckets: Iterable["BucketState"], loaded: Mapping[str, Parts]) -> dict[str, Parts]:
    """Return the final state of buckets by its kind, over what was loaded and no bucket has taken."""
    state: dict[str, Parts] = {kind: dict(parts) for kind, parts in loaded.items()}
    for kept in buckets:
        for kind, buffer in kept.buffers.items():
            state.setdefault(kind, {}).update(buffer.parts())
    return state


def stretches(layout: BucketLayout) -> npt.NDArray[np.int64]:
    """Return a row for each stretch of a bucket and of the buffers that travel; see :func:`packing.gather`."""
    rows = []
    for kind, gap, segments, numel in (
        (COMPRESSED, COMPRESSED_GAP, layout.compressed, layout.packed_numel),
        (EXACT, EXACT_GAP, layout.exact, layout.exact_numel),
    ):
        rows += [(kind, s.bucket_offset, s.packed_offset, s.parameter.numel, s.index) for s in segments]
        gaps = gaps_between([s.packed for s in segments], numel)
        rows += [(gap, 0, part.start, part.stop - part.start, 0) for part in gaps]
    return np.array(rows, np.int64).reshape(-1, 5)


class Share:
    """Which part of every bucket a rank encodes, and which part of that it owns.

    Args:
        shards: Ranks of a node that share a bucket between them (1: flat).
        shard: This rank's shard.
        owners: Chunks of a shard, one for each rank that reduces a part of it (1: nobody owns a part).
        owner: This rank's chunk.

    """

    def __init__(self, shards: int, shard: int, owners: int, owner: int) -> None:
        self.shards, self.shard, self.owners, self.owner = shards, shard, owners, owner


class BucketState:
    """Layout, residuals, method state and flags of one bucket.

    Args:
        parameters: The bucket's parameters in bucket order.
        method: The method of the run.
        share: This rank's part.
        dtype: Type of the gradients.
        device: Where they are.
        shadow: Whether a step may be skipped.
        feedback: Whether to keep residuals, for a method that can.
        layout: Where parameters lie, when that follows from something else than the other arguments.
        position: Of the bucket in its round.

    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        method: Compression,
        share: Share,
        dtype: torch.dtype,
        device: torch.device,
        shadow: bool,
        feedback: bool = True,
        layout: BucketLayout | None = None,
        position: int = 0,
    ) -> None:
        self.position = position
        layout = layout or BucketLayout(parameters, method.alignment, share.shards * share.owners)
        self.layout = layout
        self.dtype = dtype
        self.shard_numel = layout.packed_numel // share.shards
        self.shard_start = self.shard_numel * share.shard
        self.owned_start = self.shard_start + layout.chunk * share.owner
        self.first: ErrorFeedback | None = None
        self.second: ErrorFeedback | None = None
        if method.error_feedback and feedback:
            spans = spans_of(layout, self.shard_start, self.shard_numel)
            self.first = ErrorFeedback(spans, self.shard_numel, device, shadow)
            if share.owners > 1:
                spans = spans_of(layout, self.owned_start, layout.chunk)
                self.second = ErrorFeedback(spans, layout.chunk, device, shadow)
        self.method_state = method.make_state(layout, device, shadow)
        self.packed_gaps = gaps_between([s.packed for s in layout.compressed], layout.packed_numel)
        self.exact_gaps = gaps_between([s.packed for s in layout.exact], layout.exact_numel)
        self.table = stretches(layout)
        self.flags = torch.zeros(len(layout.segments), dtype=torch.uint8, device=device)
        self.flags_any = self.flags.clone()

    @property
    def buffers(self) -> dict[str, PendingBuffer]:
        """All state that follows optimizer steps: residuals of both hops, and the method's own."""
        residuals = {"first": self.first, "second": self.second}
        return {name: buffer for name, buffer in residuals.items() if buffer is not None} | self.method_state

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def keep_shadow(self) -> None:
        """See :meth:`PendingBuffer.keep_shadow`."""
        for buffer in self.buffers.values():
            buffer.keep_shadow()

    def round_done(self) -> None:
        """See :meth:`PendingBuffer.round_done`; a result is usable if some rank used the parameter and it is finite."""
        if not any(buffer.shadow for buffer in self.buffers.values()):
            return  # what was written is final
        usable = self.flags_any & (PRESENT | NONFINITE) == PRESENT
        for buffer in self.buffers.values():
            buffer.round_done(usable.tolist() if usable.device.type == "cpu" else usable)

    def commit(self, applied: bool | Tensor, names: frozenset[str] | None) -> None:
        """See :meth:`PendingBuffer.commit`."""
        for buffer in self.buffers.values():
            buffer.commit(applied, names)

    def discard(self, thrown_away: Callable[[str], bool | Tensor]) -> None:
        """See :meth:`PendingBuffer.discard`."""
        for buffer in self.buffers.values():
            buffer.discard(thrown_away)

    def clear_nonfinite(self) -> None:
        """Zero residuals that a non-finite gradient spoiled, where there is no shadow to protect them."""
        for residual in (self.first, self.second):
            if residual is not None and not residual.shadow and (names := self.nonfinite_names()):
                residual.clear(names)

    def nonfinite_names(self, here: bool = False) -> list[str]:
        """Names of the parameters whose gradient was not finite in the last round, on this rank or on any."""
        flags = (self.flags if here else self.flags_any).tolist()
        return [s.parameter.name for s, flag in zip(self.layout.segments, flags, strict=True) if flag & NONFINITE]

    def take(self, loaded: dict[str, Parts]) -> None:
        """Move this bucket's part out of loaded state."""
        for kind, buffer in self.buffers.items():
            parts = loaded.get(kind, {})
            mine = {s.parameter.name: parts.pop(s.parameter.name, []) for s in self.layout.compressed}
            buffer.load(mine)
