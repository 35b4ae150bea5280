"""What a kernel is to a method."""

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Kernel"]


class Kernel(NamedTuple):
    """Compiled encode and decode of a whole chunk, with the same results as the method's own, bit for bit.

    Their arguments are the method's views of values and payload, as it documents them.
    """

    encode: Callable[..., None]
    decode: Callable[..., None]
