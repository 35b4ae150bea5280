"""Rounding as torch rounds, by integer arithmetic where the compiler's own would differ between devices."""

import triton.language as tl

from lightning_commopt.compression.kernels.triton.compiler import part_of_kernels

__all__ = ["bits_of", "nearest_integer", "rounded", "widened"]


@part_of_kernels
def bits_of(value: tl.tensor) -> tl.tensor:
    """The bits of a float32, as int32."""
    return value.to(tl.int32, bitcast=True)


@part_of_kernels
def rounded(value: tl.tensor) -> tl.tensor:
    """Bits (int16) of the bfloat16 nearest to a float32 that is not negative, ties to even; one NaN for all."""
    bits = bits_of(value)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, up).to(tl.int16)


@part_of_kernels
def widened(bits: tl.tensor) -> tl.tensor:
    """The float32 of a bfloat16's bits (int16)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@part_of_kernels
def nearest_integer(value: tl.tensor) -> tl.tensor:
    """The integer nearest to a float32 below 2^22, ties to even, with its sign even where it is 0."""
    bits = bits_of(value)
    magnitude = bits & 0x7FFFFFFF
    whole = (magnitude.to(tl.float32, bitcast=True) + 8388608.0) - 8388608.0  # from 2^23 on, floats are integers
    return (bits_of(whole) | (bits ^ magnitude)).to(tl.float32, bitcast=True)
