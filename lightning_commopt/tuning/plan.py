"""How gradients are exchanged, as far as a prediction needs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.compression import Compression

__all__ = ["CodecCost", "Plan", "bucket_numels"]

_MB = 2**20
_FIRST_BUCKET_BYTES = 1024 * 1024  # DDP makes its first bucket this small whatever the cap is


@dataclass(frozen=True)
class CodecCost:
    """What a method costs on a device.

    Args:
        encode_ns: An element that is encoded.
        decode_ns: An element that is decoded and added.
        handling_ns: An element of a bucket, for all else: packing, residual, flags, unpacking.
        bucket_us: A bucket, whatever its size.

    """

    encode_ns: float = 0.0
    decode_ns: float = 0.0
    handling_ns: float = 0.0
    bucket_us: float = 0.0


@dataclass(frozen=True)
class Plan:
    """How gradients are exchanged.

    Args:
        method: What travels. :class:`~lightning_commopt.Uncompressed` means DDP's own reducer.
        bucket_numels: Elements in each bucket, in the order in which buckets become ready (:func:`bucket_numels`).
        codec: What the method costs here.
        exact_fraction: Part of the elements that travels exactly.
        bytes_per_element: Encoded, exact elements included, where that is known better than from the method alone:
            low rank depends on shapes.
        dense_buckets: So many of the first buckets travel densely on the same path.
        dense_codec: What handling these costs here.
        overlapped: Whether buckets are worked on while messages of others travel, as on the CPU.

    """

    method: Compression
    bucket_numels: Sequence[int]
    codec: CodecCost = CodecCost()
    exact_fraction: float = 0.0
    bytes_per_element: float | None = None
    dense_buckets: int = 0
    dense_codec: CodecCost = CodecCost()
    overlapped: bool = False


def bucket_numels(numels: Sequence[int], bucket_mb: float, *, pinned: bool = True) -> list[int]:
    """Return the elements in each of DDP's buckets of fp32 gradients, about in the order in which they become ready.

    Args:
        numels: Elements of each parameter, in the module's order.
        bucket_mb: DDP's ``bucket_cap_mb``.
        pinned: As the lossy methods lay buckets out; stock DDP does the same after its first backward.

    """
    buckets: list[int] = []
    filling = 0
    for numel in reversed(numels):
        filling += numel
        cap = min(_FIRST_BUCKET_BYTES, bucket_mb * _MB) if not buckets and pinned else bucket_mb * _MB
        if 4 * filling >= cap:
            buckets.append(filling)
            filling = 0
    return [*buckets, filling] if filling or not buckets else buckets
