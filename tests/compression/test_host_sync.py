"""Encode and decode never wait for the device.

They run on fake tensors, which have a shape, a type and a device, and no content. What would need content on the host
(`.item()`, `bool(tensor)`, `nonzero`, a boolean mask, the error check of `cholesky`) raises there. They also run on
device `meta`, which stands for an accelerator: an operation on tensors of two devices, one of which was made on the CPU
by mistake, raises there. Neither needs a GPU.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_commopt.compression import Compression, Context, Int8
from tests.compression.codec import Codec
from tests.methods import Case, each_case


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices (meta kernels do not look)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check, then do."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor) and leaf.dim()]
        if len(devices := {tensor.device for tensor in tensors}) > 1:
            raise RuntimeError(f"{func} on {devices}")
        return func(*args, **(kwargs or {}))


def encode_and_decode_fakes(method: Compression, device: str) -> torch.device:
    """Two rounds on fake or meta tensors; returns the device of the result."""
    fakes = FakeTensorMode()
    with fakes if device == "cpu" else nullcontext():
        codec = Codec(method, device=device)
    with fakes if device == "cpu" else OneDevice():
        for round in (0, 1):
            codec.context.round = round
            values = torch.empty(codec.layout.packed_numel, device=device)
            payload = codec.encode(values)
            out = codec.decode(payload)
            method.decode(payload, out, codec.context, add=True)
        return out.device


@each_case(lambda case: not case.hierarchy)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_waits_for_the_device(case: Case, device: str) -> None:
    assert encode_and_decode_fakes(case.method, device) == torch.device(device)


@dataclass(frozen=True)
class Impatient(Int8):
    """Waits, in one of several ways."""

    name: ClassVar[str] = "impatient"

    way: str = "item"

    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        """Look at the values first."""
        if self.way == "item" and values.sum().item() == 0:
            payload.zero_()
        if self.way == "mask":
            values[values.abs() > 1] = values[values.abs() > 1] / 2
        if self.way == "if" and values.any():
            payload.zero_()
        if self.way == "cpu":
            values.add_(torch.ones(len(values)))
        super().encode(values, payload, context)


@pytest.mark.parametrize(("way", "device"), [("item", "cpu"), ("mask", "cpu"), ("if", "cpu"), ("cpu", "meta")])
def test_waiting_is_seen(way: str, device: str) -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        encode_and_decode_fakes(Impatient(way=way), device)
