"""Signs and a scale."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.block_quantization import BlockQuantization

__all__ = ["OneBit"]

_GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: bit i of the top byte is byte i


@dataclass(frozen=True)
class OneBit(BlockQuantization):
    """The sign of each element and one scale a block, eight signs a byte, with error feedback on both hops.

    ``s = bf16(mean|v|)``, decoded ``s sign(v)``: the closest that two values ``{-s, s}`` come to a block. Seide et al.,
    "1-Bit Stochastic Gradient Descent" (Interspeech 2014); scaled signs with error feedback as in Karimireddy et al.
    (ICML 2019), section 4.

    Payload: ``n / 8 + 2 n / block`` bytes.

    When not to use it: where int4 is fast enough; with few steps, or with a learning rate at the edge of stability: the
    residual is larger than the gradient and delays it by some steps.

    Args:
        block: Elements that share a scale.

    """

    name: ClassVar[str] = "onebit"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "C"

    @property
    @override
    def bits(self) -> int:
        return 1

    @override
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        scratch = context.scratch
        magnitude = torch.abs(values, out=scratch.get("magnitude", values.shape, torch.float32))
        scales.copy_(magnitude.mean(1))
        positive = torch.ge(values, 0.0, out=scratch.get("positive", values.shape, torch.bool))
        bits = positive.view(torch.int64) * _GATHER_BITS
        codes.copy_(bits.bitwise_right_shift_(56).bitwise_and_(255))
        signs = magnitude.copy_(positive).mul_(2.0).sub_(1.0)
        values.addcmul_(signs, scales.float()[:, None], value=-1.0)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        signs = context.scratch.constant("signs of a byte", _signs_of_bytes)
        eight = torch.index_select(signs, 0, codes.flatten().int())
        out.copy_(eight.view(torch.int8).view_as(out)).mul_(scales[:, None])


def _signs_of_bytes() -> Tensor:
    """Return a table of int64, shape ``(256,)``: eight int8 of -1 or 1 for each byte, lowest bit first."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (2 * bits - 1).to(torch.int8).view(torch.int64).flatten()
