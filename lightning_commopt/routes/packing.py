"""Between DDP's flat bucket and the buffers that travel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_commopt.compression import ErrorFeedback, Scratch, kernels
from lightning_commopt.compression.pending import Span
from lightning_commopt.routes.bucket import BucketState
from lightning_commopt.routes.message import NONFINITE, PRESENT

__all__ = ["compensated", "fold_second_hop", "gather", "pack", "pack_exact", "raise_flags", "unpack"]


def gather(
    kept: BucketState,
    bucket: Tensor,
    flags: Sequence[int],
    scale: Tensor | None,
    scratch: Scratch,
    residual: ErrorFeedback | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values to be encoded, the exact gradients, and flags, in one pass where a kernel fits.

    Args:
        kept: The bucket's state, which keeps the flags.
        bucket: Its flat gradients, shape ``(numel,)``.
        flags: What is known of each parameter; ``NONFINITE`` is added.
        scale: The factor that gradients carry; None for 1.
        scratch: Working memory.
        residual: To be added to the values; None: nothing is.

    """
    packing = kernels.packing_for(bucket) if scale is None else None
    if packing is None or not (residual is None or residual.settled):
        raise_flags(kept, bucket, flags)
        exact = pack_exact(kept, bucket, scratch)
        if residual is None:
            return pack(kept, bucket, scale, scratch), exact, kept.flags
        return compensated(kept, residual, bucket, scale), exact, kept.flags

    exact = scratch.get("exact", (kept.layout.exact_numel,), kept.dtype)
    kept.flags.numpy()[:] = flags

    def fill(before: Tensor, values: Tensor) -> None:
        there = before is values
        other = values[:0] if there else before
        packing.gather(*(t.numpy() for t in (bucket, other, values, exact, kept.flags)), kept.table, there, NONFINITE)

    if residual is not None:
        return residual.compensate_all(fill), exact, kept.flags
    values = scratch.get("values", (kept.layout.packed_numel,), torch.float32)
    fill(values[:0], values)
    return values, exact, kept.flags


def compensated(kept: BucketState, residual: ErrorFeedback, bucket: Tensor, scale: Tensor | None) -> Tensor:
    """Return gradient plus residual in true units, packed.

    Args:
        kept: The bucket's state.
        residual: What earlier rounds dropped.
        bucket: Its flat gradients, shape ``(numel,)``.
        scale: The factor that they carry; None for 1.

    """
    inverse = None if scale is None else scale.reciprocal()

    def add(span: Span, residual: Tensor, out: Tensor) -> None:
        gradient = bucket[kept.layout.segments[span.index].in_bucket]
        if inverse is None:
            torch.add(residual, gradient, out=out)
        else:
            torch.addcmul(residual, gradient.to(residual.dtype), inverse, out=out)

    return residual.compensate(add)


def pack(kept: BucketState, bucket: Tensor, scale: Tensor | None, scratch: Scratch) -> Tensor:
    """Return the compressed parameters' gradients in true units, fp32, packed."""
    values = scratch.get("values", (kept.layout.packed_numel,), torch.float32)
    for segment in kept.layout.compressed:
        values[segment.packed].copy_(bucket[segment.in_bucket])
    for gap in kept.packed_gaps:
        values[gap].zero_()
    return values if scale is None else values.mul_(scale.reciprocal())


def pack_exact(kept: BucketState, bucket: Tensor, scratch: Scratch) -> Tensor:
    """Return the gradients that travel exactly, behind each other, in the bucket's dtype and scale."""
    exact = scratch.get("exact", (kept.layout.exact_numel,), kept.dtype)
    for segment in kept.layout.exact:
        exact[segment.packed].copy_(bucket[segment.in_bucket])
    for gap in kept.exact_gaps:
        exact[gap].zero_()
    return exact


def raise_flags(kept: BucketState, bucket: Tensor, flags: Sequence[int]) -> None:
    """Keep of each parameter what is known, and whether its gradient is not finite; arguments as for `gather`."""
    zero = bucket.new_zeros(1)  # stands in for an empty parameter
    extremes = [torch.aminmax(bucket[s.in_bucket] if s.parameter.numel else zero) for s in kept.layout.segments]
    finite = [torch.isfinite(torch.stack(side)) for side in zip(*extremes, strict=True)]  # both keep NaN
    nonfinite = (finite[0] & finite[1]).logical_not_()
    known = torch.tensor(flags, dtype=torch.uint8, device=bucket.device)
    torch.add(known, nonfinite.to(torch.uint8), alpha=NONFINITE, out=kept.flags)


def fold_second_hop(kept: BucketState, values: Tensor, owners: int) -> None:
    """Move the second-hop residual of the own chunk into the values, once for each owner, since a mean follows."""
    start = kept.owned_start - kept.shard_start

    def move(span: Span, residual: Tensor, out: Tensor) -> None:
        values[start + span.buffer.start : start + span.buffer.stop].add_(residual, alpha=owners)
        out.zero_()

    if kept.second is not None:
        kept.second.compensate(move)


def unpack(
    kept: BucketState, mean: Tensor, exact_mean: Tensor, scale: Tensor | None, bucket: Tensor, keep_unused: bool
) -> None:
    """Put the mean into the bucket; a parameter that was not finite on some rank becomes NaN on all.

    Args:
        kept: The bucket's state, with the flags set on any rank.
        mean: fp32, shape ``(packed_numel,)``, in true units.
        exact_mean: Shape ``(exact_numel,)``, in the bucket's scale.
        scale: The factor that gradients carry; None for 1.
        bucket: Flat gradients, shape ``(numel,)``; overwritten.
        keep_unused: Leave alone what no rank used: it may be an earlier round's result, seen through a view.

    """
    if packing := kernels.packing_for(mean, exact_mean, bucket):
        arrays = (t.numpy() for t in (mean, exact_mean, kept.flags_any, bucket))
        factor = 1.0 if scale is None else float(scale)
        packing.scatter(*arrays, kept.table, PRESENT * keep_unused, NONFINITE, factor)
        return
    present = (kept.flags_any & PRESENT) != 0
    finite = torch.where((kept.flags_any & NONFINITE) != 0, torch.nan, 1.0)
    scaled = finite if scale is None else finite * scale
    for segment in kept.layout.segments:
        source, factor = (exact_mean, finite) if segment.parameter.exact else (mean, scaled)
        part = bucket[segment.in_bucket]
        before = part.clone() if keep_unused else part
        torch.mul(source[segment.packed], factor[segment.index], out=part)
        if keep_unused:
            torch.where(present[segment.index], part, before, out=part)
