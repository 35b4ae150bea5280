"""Compiled ways between DDP's flat bucket and the buffers that travel: every element is visited once."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_commopt.compression.kernels.kernel import COMPRESSED, COMPRESSED_GAP, EXACT
from lightning_commopt.compression.kernels.numba.compiler import compiled

__all__ = ["gather", "merge", "scatter"]

Array = npt.NDArray[Any]

_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_NONE, _ONE = np.float32(0.0), np.float32(1.0)


@compiled("void(float32[::1], float32[::1], float32[::1], float32[::1], uint8[::1], int64[:, ::1], boolean, uint8)")
def gather(
    bucket: Array, residual: Array, values: Array, exact: Array, flags: Array, table: Array, add: bool, nonfinite: int
) -> None:
    """Write gradient plus residual, exact gradients, and flags.

    Args:
        bucket: The gradients.
        residual: As long as ``values``, other memory; empty: there is none.
        values: Gradients that are to be encoded; written.
        exact: Those that travel as they are; written.
        flags: A byte a parameter, to which ``nonfinite`` is added.
        table: A row for each stretch: what it is, where it begins in the bucket, where in ``values`` or ``exact``, how
            many elements it has, and the number of its parameter.
        add: Whether the residual is in ``values``.
        nonfinite: The flag of a gradient that is not finite.

    """
    for r in range(len(table)):
        kind, source, target, count, index = table[r]
        if kind >= COMPRESSED_GAP:
            gap = (values if kind == COMPRESSED_GAP else exact)[target : target + count]
            for i in range(count):
                gap[i] = _NONE
            continue
        gradient = bucket[source : source + count]
        bits, largest = gradient.view(np.int32), np.int32(0)
        if kind == EXACT:
            out = exact[target : target + count]
            for i in range(count):
                largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
                out[i] = gradient[i]
        elif len(residual):
            old, out = residual[target : target + count], values[target : target + count]
            for i in range(count):
                largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
                out[i] = old[i] + gradient[i]
        elif add:  # the same memory twice would not be worked on in vectors
            out = values[target : target + count]
            for i in range(count):
                largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
                out[i] += gradient[i]
        else:
            out = values[target : target + count]
            for i in range(count):
                largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
                out[i] = gradient[i]
        if largest >= _INFINITE:
            flags[index] |= np.uint8(nonfinite)


@compiled("void(float32[::1], float32[::1], uint8[::1], float32[::1], int64[:, ::1], uint8, uint8, float32)")
def scatter(
    mean: Array, exact_mean: Array, flags: Array, bucket: Array, table: Array, needed: int, nonfinite: int, scale: float
) -> None:
    """Write the means of all parameters into the bucket.

    Args:
        mean: Of what was encoded.
        exact_mean: Of what travelled as it is.
        flags: A byte a parameter.
        bucket: Written.
        table: As for :func:`gather`.
        needed: A parameter without any of these flags is left alone; 0: none is.
        nonfinite: A parameter with this flag becomes NaN.
        scale: A factor to ``mean``.

    """
    for r in range(len(table)):
        kind, source, target, count, index = table[r]
        if kind >= COMPRESSED_GAP or (needed and not flags[index] & needed):
            continue
        factor = scale if kind == COMPRESSED else _ONE
        if flags[index] & nonfinite:
            factor = np.float32(np.nan)
        out = bucket[source : source + count]
        part = (mean if kind == COMPRESSED else exact_mean)[target : target + count]
        for i in range(count):
            out[i] = part[i] * factor


@compiled("void(uint8[:, ::1], int64, float32, uint8[::1], float32[::1])")
def merge(rows: Array, exact_at: int, share: float, flags: Array, exact: Array) -> None:
    """Put flags and exact gradients of some messages together.

    Args:
        rows: The messages: flags, and from the byte ``exact_at`` on exact gradients.
        exact_at: Where these begin.
        share: A factor to their sum.
        flags: Bitwise or over messages; written.
        exact: Sum in the order of messages times ``share``; written.

    """
    flags[:] = rows[0, : len(flags)]
    for r in range(1, len(rows)):
        for i in range(len(flags)):
            flags[i] |= rows[r, i]
    for r in range(len(rows)):
        part = rows[r, exact_at : exact_at + 4 * len(exact)].view(np.float32)
        for i in range(len(exact)):
            exact[i] = part[i] if r == 0 else exact[i] + part[i]
    for i in range(len(exact)):
        exact[i] *= share
