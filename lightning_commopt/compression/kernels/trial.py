"""A few blocks, encoded and decoded for what a compiler does at the first use."""

import torch

from lightning_commopt.compression.base import Compression, Context, Scratch
from lightning_commopt.compression.layout import BucketLayout, Parameter

__all__ = ["encode_and_decode"]

_SHAPES = ((16, 16), (1, 8))  # one whose columns may be scaled, one that is too small
_ALIGNMENT = 16  # bytes; kernels may differ by whether an address is a multiple of it


def encode_and_decode(method: Compression, device: torch.device) -> None:
    """Use every variant of a method's kernels on a device: payloads at every address modulo 16."""
    shapes = [Parameter(f"{shape}", shape, exact=False) for shape in _SHAPES]
    layout = BucketLayout(shapes, method.alignment, owners=1)
    context = Context(layout, 0, 0, 0, 1, Scratch(device), method.make_state(layout, device, shadow=False))
    values = torch.zeros(layout.packed_numel, device=device)
    nbytes = method.payload_bytes(len(values), context)
    memory = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    for offset in range(0, _ALIGNMENT, 2):  # scales are bfloat16
        payload = memory[offset : offset + nbytes].view(method.wire_dtype)
        method.encode(values, payload, context)
        for add in (False, True):
            method.decode(payload, values, context, add=add)
