"""Whether all ranks hold the same parameters."""

import hashlib
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["as_bits", "bit_weights", "bits_hash", "first_difference", "first_differing"]

_BLOCK = 1 << 18
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def first_difference(module: Module, all_gather: Callable[[Any], list[Any]]) -> tuple[str, tuple[int, ...]] | None:
    """Compare the bits of all parameters over ranks. A collective: call it on all ranks.

    Args:
        module: The same module on every rank.
        all_gather: Returns every rank's object, by rank.

    Returns:
        None when all are equal; otherwise the first parameter that differs, and the ranks where it differs from rank 0.

    """
    return first_differing(dict(module.named_parameters()), all_gather)


def first_differing(
    named: Mapping[str, Tensor], all_gather: Callable[[Any], list[Any]]
) -> tuple[str, tuple[int, ...]] | None:
    """Compare the bits of named tensors over ranks, as :func:`first_difference` does. A collective.

    Args:
        named: Tensors under the same names on every rank.
        all_gather: Returns every rank's object, by rank.

    """
    hashes = _numbers([_hashed(tensor) for tensor in named.values()])
    folded = hashlib.blake2b(struct.pack(f"<{len(hashes)}q", *hashes), digest_size=8).hexdigest()
    if len(set(all_gather(folded))) == 1:
        return None
    everyone = all_gather(hashes)
    for name, values in zip(named, zip(*everyone, strict=True), strict=True):
        if ranks := tuple(rank for rank, value in enumerate(values) if value != values[0]):
            return name, ranks
    raise AssertionError("Digests differ, but no hash does.")


def bits_hash(tensor: Tensor) -> int:
    """Hash the bits of a tensor into an int64, on its device.

    Every element has a weight of its own, so that permutations and constant fills show, as they do not in the plain
    exclusive or of ``torch.hash_tensor``.
    """
    return int(_hashed(tensor))


def _hashed(tensor: Tensor) -> Tensor:
    """The hash on the tensor's device, 0-d."""
    bits = as_bits(tensor)
    weights = bit_weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return total


def _numbers(totals: list[Tensor]) -> list[int]:
    """Bring 0-d tensors to the host, waiting for their device once where they share one."""
    if len({total.device for total in totals}) > 1:
        return [int(total) for total in totals]
    return [] if not totals else torch.stack(totals).tolist()


def as_bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a vector of integers of at most 32 bits."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


@cache
def bit_weights(device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, int64, shape ``(2 ** 18,)``; sums and products of them wrap around."""
    mixed = torch.arange(1, _BLOCK + 1, device=device) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32) | 1
