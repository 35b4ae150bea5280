"""float16 on the wire."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.block_quantization import BlockQuantization

__all__ = ["FP16"]


@dataclass(frozen=True)
class FP16(BlockQuantization):
    """Casts to float16 under a power-of-two scale of each block, and adds in fp32.

    ``s = 2^ceil(log2 max|v|)``, ``payload = fp16(v / s)``: 11 bits of significand for every number down to ``2^-14``
    of its block's largest, so nothing overflows (a plain cast fails above 65504) and small gradients do not vanish (a
    plain cast loses those below 6e-8). Payloads are decoded before they are added. It is a cast, so there is no error
    feedback: the mean of ``W`` ranks errs by at most ``2^-11`` times the mean of the magnitudes, or ``2^-24`` times the
    largest of the block where that is more, once more when there is a second hop.

    Payload: ``2 n + 2 n / block`` bytes.

    When not to use it: inside a node with fast links, where the cast costs more than the bytes it saves.

    Args:
        block: Elements that share a scale.

    """

    name: ClassVar[str] = "fp16"
    error_feedback: ClassVar[bool] = False
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "A"

    @property
    @override
    def bits(self) -> int:
        return 16

    @override
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        largest = values.abs().amax(1)
        exponent = torch.frexp(largest).exponent.clamp_(-100, 127)
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scales.copy_(scale)
        code = codes.view(torch.float16)
        torch.mul(values, scale.reciprocal()[:, None], out=code)
        values.addcmul_(code.float(), scale[:, None], value=-1.0)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        out.copy_(codes.view(torch.float16)).mul_(scales[:, None])
