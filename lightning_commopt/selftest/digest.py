"""Bits, in short form."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["digest"]


def digest(tensors: Mapping[str, Tensor | None]) -> str:
    """Return a digest of names, shapes and bits: equal exactly if all of them are."""
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {None if tensor is None else tuple(tensor.shape)} ".encode())
        if tensor is not None:
            made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()
