"""Noise for stochastic rounding that depends on what is rounded and not on where it lies."""

import zlib

import torch
from torch import Tensor

from lightning_commopt.compression.base import Context

__all__ = ["rounding_noise"]


def rounding_noise(numel: int, seed: int, context: Context) -> Tensor:
    """Return uniform noise in [0, 1) for ``numel`` elements from ``context.start`` on.

    Each number is a hash of (seed, round, hop, sending rank, parameter, element): independent between ranks (a stream
    shared by ranks gives correlated errors that do not average out), the same after a resume, and independent of the
    layout. The hash is the finaliser of MurmurHash3 (A. Appleby, public domain), counter-based as in Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): no generator state, no host synchronisation.

    Args:
        numel: Number of elements.
        seed: The user's seed.
        context: Round, hop, rank and the parameters that lie there.

    Returns:
        fp32, shape ``(numel,)``; 0.5 at padding.

    """
    noise = torch.full((numel,), 0.5, device=context.scratch.device)
    for segment, first, last in context.layout.overlapping(context.start, numel):
        sender = context.rank if context.hop == 1 else "owner"  # which rank owns an element depends on the layout
        words = f"{seed},{context.round},{context.hop},{sender},{segment.parameter.name}"
        key = zlib.crc32(words.encode())
        begin = context.start + first - segment.packed_offset
        counter = torch.arange(begin, begin + last - first, dtype=torch.int64, device=noise.device)
        noise[first:last] = _hash32(counter, key).mul_(2.0**-24)
    return noise


def _hash32(counter: Tensor, key: int) -> Tensor:
    """Mix 32-bit counters with a key; the 24 highest bits as fp32."""
    mask = 0xFFFFFFFF
    bits = (counter * 0x9E3779B1 + key) & mask
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        bits = ((bits ^ (bits >> shift)) * multiplier) & mask
    bits ^= bits >> 16
    return (bits >> 8).to(torch.float32)
