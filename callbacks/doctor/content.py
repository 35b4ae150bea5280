"""What batches and data sets contain, in a few numbers that can be compared over ranks."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_commopt.callbacks.monitor.replicas import as_bits, bit_weights

__all__ = ["data_digest", "sample_hashes"]

_COLUMNS = 1 << 16  # of a sample that are looked at, spread over all of it
_DEPTH = 4
_SEQUENCE = (list, tuple)


def sample_hashes(batch: Any) -> list[int] | None:
    """Hash each sample of a batch; None where the batch holds no tensors with samples."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.numel()]
    if not tensors:
        return None
    count = len(tensors[0])
    hashes = [_row_hashes(tensor) for tensor in tensors if len(tensor) == count and tensor.layout == torch.strided]
    if not hashes:
        return None
    folded: list[int] = sum(h * (2 * i + 3) for i, h in enumerate(hashes)).tolist()  # type: ignore[union-attr]
    return folded


def _row_hashes(tensor: Tensor) -> Tensor:
    """Hash each row into an int64, shape ``(rows,)``."""
    bits = as_bits(tensor).view(len(tensor), -1)
    bits = bits[:, :: -(-bits.shape[1] // _COLUMNS)].long()
    return (bits * bit_weights(bits.device)[: bits.shape[1]]).sum(1)


def data_digest(dataset: Any) -> str:
    """Return a short text that tells data sets apart, without drawing a sample: that may have side effects.

    It covers types, lengths, and both ends of the tensors, arrays and lists that a data set holds.
    """
    digest = hashlib.blake2b(digest_size=12)
    _feed(digest, dataset, _DEPTH)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, depth: int) -> None:
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, str | int | float | bool):
        digest.update(repr(value).encode())
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        if value.shape and len(value):
            digest.update(f"{value[0]} {value[-1]}".encode())
    elif depth and isinstance(value, _SEQUENCE):
        digest.update(str(len(value)).encode())
        for item in (*value[:2], *value[-2:]):
            _feed(digest, item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        for name, item in sorted(vars(value).items()):
            digest.update(name.encode())
            _feed(digest, item, depth - 1)
