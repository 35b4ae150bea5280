"""Compiled selection of the largest elements: a sample bounds them from below, and a bisection of those left is exact.

Of equal magnitudes the first are taken; ``torch.topk`` takes any. Magnitudes order as the integers of their bits do.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.numba.bfloat16 import rounded, widened
from lightning_commopt.compression.kernels.numba.compiler import compiled, part_of_kernels
from lightning_commopt.compression.topk import TopK

__all__ = ["kernel_of"]

Array = npt.NDArray[Any]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SAMPLE = 1 << 14  # elements
_GROUP = 64  # elements that are skipped together where all are small


@part_of_kernels
def _count(bits: Array, least: Any) -> Any:
    """How many magnitudes are at least ``least``."""
    count = np.int32(0)
    for i in range(len(bits)):
        count += np.int32((bits[i] & _MAGNITUDE) >= least)
    return count


@part_of_kernels
def _threshold(bits: Array, kept: int) -> Any:
    """The magnitude of rank ``kept``: the largest that at least so many reach."""
    least, bit = np.int32(0), np.int32(1 << 30)
    while bit:
        if _count(bits, np.int32(least | bit)) >= kept:
            least = np.int32(least | bit)
        bit = np.int32(bit >> 1)
    return least


@compiled("void(int32[::1], int32[::1])")
def _select(bits: Array, places: Array) -> None:
    """Write the places, ascending, of the ``len(places)`` largest magnitudes."""
    numel, kept = len(bits), len(places)
    sample = bits[:: max(1, numel // _SAMPLE)].copy()
    share = kept / numel * len(sample)
    least = _threshold(sample, min(int(share + 4.0 * np.sqrt(share) + 4.0), len(sample)))
    groups = numel // _GROUP
    counts = np.empty(groups + 1, np.int32)
    candidates = 0
    for g in range(groups + 1):
        counts[g] = _count(bits[g * _GROUP : (g + 1) * _GROUP], least)
        candidates += counts[g]
    if candidates < kept:  # the sample misled
        least = _threshold(bits, kept)
        candidates = 0
        for g in range(groups + 1):
            counts[g] = _count(bits[g * _GROUP : (g + 1) * _GROUP], least)
            candidates += counts[g]
    place, large = np.empty(candidates, np.int32), np.empty(candidates, np.int32)
    found = 0
    for g in range(groups + 1):
        if counts[g]:
            for i in range(g * _GROUP, min((g + 1) * _GROUP, numel)):
                magnitude = np.int32(bits[i] & _MAGNITUDE)
                if magnitude >= least:
                    place[found], large[found] = i, magnitude
                    found += 1
    last = _threshold(large, kept)
    equal = kept - (_count(large, np.int32(last + 1)) if last < _MAGNITUDE else 0)
    found = 0
    for i in range(candidates):
        if large[i] > last or (large[i] == last and equal > 0):
            equal -= large[i] == last
            places[found] = place[i]
            found += 1


@compiled("void(float32[::1], int32[::1], uint16[::1])")
def _take(values: Array, places: Array, code: Array) -> None:
    """Write the values at some places as bfloat16, and leave there what rounding drops."""
    for i in range(len(places)):
        at = places[i]
        code[i] = rounded(values[at])
        values[at] -= widened(code[i])


@compiled("void(int32[::1], uint8[::1])")
def _set_bits(places: Array, packed: Array) -> None:
    packed[:] = 0
    for at in places:
        packed[at >> 3] |= np.uint8(1 << (at & 7))


@compiled("void(int32[::1], uint16[::1], float32[::1])")
def _add_at(places: Array, code: Array, out: Array) -> None:
    for i in range(len(places)):
        at = places[i]
        if not 0 <= at < len(out):
            raise IndexError("a place lies outside the chunk")
        out[at] += widened(code[i])


@compiled("void(uint8[::1], uint16[::1], float32[::1])")
def _add_where_set(packed: Array, code: Array, out: Array) -> None:
    taken = 0
    for byte in range(len(packed)):
        if packed[byte]:
            for bit in range(8):
                if (packed[byte] >> bit) & 1:
                    if taken == len(code):
                        raise IndexError("more places than values")
                    out[8 * byte + bit] += widened(code[taken])
                    taken += 1


def _encode(values: Tensor, places: Tensor, code: Tensor) -> None:
    flat = places.numpy() if places.dtype == torch.int32 else np.empty(len(code), np.int32)
    _select(values.view(torch.int32).numpy(), flat)
    _take(values.numpy(), flat, code.view(torch.uint16).numpy())
    if places.dtype == torch.uint8:
        _set_bits(flat, places.numpy())


def _decode(places: Tensor, code: Tensor, out: Tensor, add: bool) -> None:
    if not add:
        out.zero_()
    add_values = _add_at if places.dtype == torch.int32 else _add_where_set
    add_values(places.numpy(), code.view(torch.uint16).numpy(), out.numpy())


def kernel_of(method: Compression) -> Kernel | None:
    """Return the kernel of a method, None where it has none."""
    return Kernel(_encode, _decode) if type(method) is TopK else None
