"""bfloat16 as the upper half of a float32's bits."""

from typing import Any

import numpy as np

from lightning_commopt.compression.kernels.numba.compiler import part_of_kernels

__all__ = ["rounded", "widened"]


@part_of_kernels
def rounded(value: Any) -> Any:
    """Bits (uint16) of the bfloat16 nearest to a float32, ties to even, as torch rounds; one NaN for all."""
    bits = np.float32(value).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@part_of_kernels
def widened(bits: Any) -> Any:
    """The float32 of a bfloat16's bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
