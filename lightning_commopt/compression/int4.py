"""4-bit block quantisation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.block_quantization import BlockQuantization, quantization_step

__all__ = ["Int4"]


@dataclass(frozen=True)
class Int4(BlockQuantization):
    """Signed 4-bit codes with one scale a block, two codes a byte, with error feedback on both hops.

    ``s = bf16(max|v| / 7)``, ``q = round(v / s)``, decoded ``s q``. Elements ``i`` and ``i + block / 2``
    of a block share a byte, so that packing works on whole rows. Sources as for :class:`Int8`.

    Payload: ``n / 2 + 2 n / block`` bytes.

    When not to use it: where int8 already hides the communication; without error feedback's many small steps (a few
    hundred at least) the coarse codes have no time to average out.

    Args:
        block: Elements that share a scale. Smaller blocks follow uneven gradients better and cost more bytes.

    """

    name: ClassVar[str] = "int4"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "B"

    @property
    @override
    def bits(self) -> int:
        return 4

    @override
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        step, inverse = quantization_step(values, 7.0, scales, context)
        code = torch.mul(values, inverse, out=context.scratch.get("code", values.shape, torch.float32))
        values.addcmul_(code.round_(), step, value=-1.0)
        low, high = code.add_(8.0).chunk(2, dim=1)
        codes.copy_(low.add_(high, alpha=16.0))

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        low, high = out.chunk(2, dim=1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        out.sub_(8.0).mul_(scales[:, None])
