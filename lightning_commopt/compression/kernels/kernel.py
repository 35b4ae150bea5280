"""What a kernel is to a method."""

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["COMPRESSED", "COMPRESSED_GAP", "EXACT", "EXACT_GAP", "Kernel"]

COMPRESSED, EXACT, COMPRESSED_GAP, EXACT_GAP = 0, 1, 2, 3
"""What a stretch of a buffer belongs to, in the tables of ``numba/packing.py``."""


class Kernel(NamedTuple):
    """Compiled encode and decode of a whole chunk, with the same results as the method's own, bit for bit.

    Their arguments are the method's views of values and payload, as it documents them.
    """

    encode: Callable[..., None]
    decode: Callable[..., None]
