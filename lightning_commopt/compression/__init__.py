"""What goes on the wire: one compression method a file, each an options dataclass that is its own codec."""

from collections.abc import Sequence

from lightning_commopt.compression import kernels
from lightning_commopt.compression.base import Compression, Context, Scratch
from lightning_commopt.compression.bf16 import BF16
from lightning_commopt.compression.error_feedback import ErrorFeedback
from lightning_commopt.compression.fp16 import FP16
from lightning_commopt.compression.int4 import Int4
from lightning_commopt.compression.int8 import Int8
from lightning_commopt.compression.layout import BucketLayout, Parameter, Segment
from lightning_commopt.compression.onebit import OneBit
from lightning_commopt.compression.powersgd import PowerSGD
from lightning_commopt.compression.topk import TopK
from lightning_commopt.compression.uncompressed import Uncompressed

__all__ = [
    "BF16",
    "FP16",
    "METHODS",
    "BucketLayout",
    "Compression",
    "Context",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "OneBit",
    "Parameter",
    "PowerSGD",
    "Scratch",
    "Segment",
    "TopK",
    "Uncompressed",
    "kernels",
    "method_named",
]

METHODS: dict[str, type[Compression]] = {
    method.name: method for method in (Uncompressed, BF16, FP16, Int8, Int4, OneBit, TopK, PowerSGD)
}
"""Every method by the word that selects it, mildest first."""


def method_named(compression: "str | Compression", others: Sequence[str] = ()) -> Compression:
    """Return the method that a user means.

    Args:
        compression: A word (the method with its defaults) or the method itself.
        others: Words beside methods that the caller knows, to be listed with them.

    Raises:
        ValueError: The word names no method; the message lists those that exist.
        TypeError: It is neither.

    """
    if isinstance(compression, Compression):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compression):
        raise TypeError(f"`compression={compression.__name__}` is the class: write `{compression.__name__}()`.")
    if not isinstance(compression, str):
        raise TypeError(f"`compression` must be a word or a `Compression`, not {type(compression).__name__}.")
    if compression not in METHODS:
        known = ", ".join(repr(name) for name in (*others, *METHODS))
        raise ValueError(f"`compression={compression!r}` is not a method. Choose one of {known}, or pass its options.")
    return METHODS[compression]()
