"""Compiled int8 and int4: one pass over each block for its scale, one for codes and residual."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.int4 import Int4
from lightning_commopt.compression.int8 import Int8
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.numba.bfloat16 import rounded, widened
from lightning_commopt.compression.kernels.numba.compiler import compiled, part_of_kernels

__all__ = ["kernel_of"]

Array = npt.NDArray[Any]


_INT8 = np.float32(1 / 127.0)
_INT4 = np.float32(1 / 7.0)
_SMALLEST = np.float32(1e-30)
_ONE, _NONE = np.float32(1.0), np.float32(0.0)


@part_of_kernels
def _store_step(block: Array, inverse_largest: Any, scales: Array, at: int) -> Any:
    """Store the scale of a block as a bfloat16; returns it as it was stored."""
    bits, largest = block.view(np.int32), np.int32(0)
    for i in range(len(bits)):  # magnitudes order as the integers of their bits do, NaN above all
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    scales[at] = rounded(np.int32(largest).view(np.float32) * inverse_largest)
    return widened(scales[at])


@compiled("void(float32[:, ::1], uint16[::1], int8[:, ::1])")
def _encode_int8(values: Array, scales: Array, codes: Array) -> None:
    for b in range(len(values)):
        block, code = values[b], codes[b]
        step = _store_step(block, _INT8, scales, b)
        inverse = _ONE / step if step > _SMALLEST else _NONE
        for i in range(len(block)):
            level = np.rint(block[i] * inverse)
            code[i] = np.int8(np.int32(level))
            block[i] -= level * step


@compiled("void(float32[:, ::1], uint16[::1], uint8[:, ::1])")
def _encode_int4(values: Array, scales: Array, codes: Array) -> None:
    half = values.shape[1] // 2
    for b in range(len(values)):
        low, high, code = values[b, :half], values[b, half:], codes[b]
        step = _store_step(values[b], _INT4, scales, b)
        inverse = _ONE / step if step > _SMALLEST else _NONE
        for i in range(half):
            lower, upper = np.rint(low[i] * inverse), np.rint(high[i] * inverse)
            code[i] = np.uint8(np.int32(lower + np.float32(16.0) * upper) + np.int32(8 + 16 * 8))
            low[i] -= lower * step
            high[i] -= upper * step


@compiled("void(uint16[::1], int8[:, ::1], float32[:, ::1], boolean)")
def _decode_int8(scales: Array, codes: Array, out: Array, add: bool) -> None:
    for b in range(len(out)):
        block, code, step = out[b], codes[b], widened(scales[b])
        if add:
            for i in range(len(block)):
                block[i] += np.float32(code[i]) * step
        else:
            for i in range(len(block)):
                block[i] = np.float32(code[i]) * step


@compiled("void(uint16[::1], uint8[:, ::1], float32[:, ::1], boolean)")
def _decode_int4(scales: Array, codes: Array, out: Array, add: bool) -> None:
    half = out.shape[1] // 2
    for b in range(len(out)):
        low, high, code, step = out[b, :half], out[b, half:], codes[b], widened(scales[b])
        if add:
            for i in range(half):
                low[i] += (np.float32(code[i] & np.uint8(15)) - np.float32(8.0)) * step
            for i in range(half):
                high[i] += (np.float32(code[i] >> np.uint8(4)) - np.float32(8.0)) * step
        else:
            for i in range(half):
                low[i] = (np.float32(code[i] & np.uint8(15)) - np.float32(8.0)) * step
            for i in range(half):
                high[i] = (np.float32(code[i] >> np.uint8(4)) - np.float32(8.0)) * step


def _int8_encode(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    _encode_int8(values.numpy(), scales.view(torch.uint16).numpy(), codes.view(torch.int8).numpy())


def _int8_decode(scales: Tensor, codes: Tensor, out: Tensor, add: bool) -> None:
    _decode_int8(scales.view(torch.uint16).numpy(), codes.view(torch.int8).numpy(), out.numpy(), add)


def _int4_encode(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    _encode_int4(values.numpy(), scales.view(torch.uint16).numpy(), codes.numpy())


def _int4_decode(scales: Tensor, codes: Tensor, out: Tensor, add: bool) -> None:
    _decode_int4(scales.view(torch.uint16).numpy(), codes.numpy(), out.numpy(), add)


def kernel_of(method: Compression) -> Kernel | None:
    """Return the kernel of a method, None where it has none."""
    if type(method) is Int8 and not method.stochastic:
        return Kernel(_int8_encode, _int8_decode)
    return Kernel(_int4_encode, _int4_decode) if type(method) is Int4 else None
