"""Eight booleans a byte."""

import torch
from torch import Tensor

from lightning_commopt.compression.base import Scratch

__all__ = ["pack_bits", "unpack_bits"]

_GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: bit i of the top byte is byte i


def pack_bits(flags: Tensor, packed: Tensor) -> None:
    """Write eight booleans a byte, the first in the lowest bit.

    Args:
        flags: bool, shape ``(..., 8 n)``, contiguous.
        packed: uint8, shape ``(..., n)``; written.

    """
    bits = flags.view(torch.int64) * _GATHER_BITS
    packed.copy_(bits.bitwise_right_shift_(56).bitwise_and_(255))


def unpack_bits(packed: Tensor, scratch: Scratch, zero: int = 0) -> Tensor:
    """Return int8 of 1 where a bit is set and ``zero`` elsewhere, shape ``(8 n,)`` for ``n`` bytes of any shape."""
    table = scratch.constant(f"eight of {zero} or 1", lambda: _table(zero))
    return torch.index_select(table, 0, packed.flatten().int()).view(torch.int8)


def _table(zero: int) -> Tensor:
    """Return int64, shape ``(256,)``: the eight int8 of each byte."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits + zero * (1 - bits)).to(torch.int8).view(torch.int64).flatten()
