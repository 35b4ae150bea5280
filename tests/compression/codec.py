"""One chunk of a bucket, encoded and decoded by a method."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_commopt.compression import BucketLayout, Compression, Context, Parameter, Scratch

__all__ = ["SHAPES", "Codec"]

SHAPES: Mapping[str, tuple[int, ...]] = {"square": (61, 67), "wide": (24, 101), "bias": (61,), "again": (61, 67)}


class Codec:
    """A method on a bucket of its own.

    Args:
        method: The method.
        shapes: The bucket's parameters.
        device: Where everything is.
        rank: The rank that encodes.
        hop: 1 for a gradient, 2 for a mean.
    """

    def __init__(
        self,
        method: Compression,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        device: str = "cpu",
        rank: int = 0,
        hop: int = 1,
    ) -> None:
        self.method = method
        self.device = torch.device(device)
        parameters = [Parameter(name, shape, method.travels_exactly(shape)) for name, shape in shapes.items()]
        self.layout = BucketLayout(parameters, method.alignment, owners=1)
        state = method.make_state(self.layout, self.device, False)
        self.context = Context(self.layout, 0, 0, rank, hop, Scratch(self.device), state)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """The packed buffer with some parameters' values, zero elsewhere."""
        packed = torch.zeros(self.layout.packed_numel, device=self.device)
        for segment in self.layout.compressed:
            if segment.parameter.name in values:
                packed[segment.packed] = values[segment.parameter.name].flatten()
        return packed

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The values of every compressed parameter."""
        return {s.parameter.name: packed[s.packed].view(s.parameter.shape) for s in self.layout.compressed}

    def random(self, seed: int = 0, magnitude: float = 1.0) -> Tensor:
        """A packed buffer of numbers in [-magnitude, magnitude]."""
        generator = torch.Generator().manual_seed(seed)
        uniform = {
            s.parameter.name: (torch.rand(s.parameter.shape, generator=generator) * 2 - 1) * magnitude
            for s in self.layout.compressed
        }
        return self.pack(uniform)

    def encode(self, values: Tensor, fill: int = 0) -> Tensor:
        """The payload; `values` become the residual.

        Args:
            values: The packed buffer.
            fill: What every byte of the payload is before.
        """
        nbytes = self.method.payload_bytes(len(values), self.context)
        payload = torch.full((nbytes,), fill, dtype=torch.uint8, device=self.device).view(self.method.wire_dtype)
        self.method.encode(values, payload, self.context)
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        """What a payload stands for."""
        out = torch.full((self.layout.packed_numel,), torch.nan, device=self.device)
        self.method.decode(payload, out, self.context)
        return out
