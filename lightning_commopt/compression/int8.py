"""8-bit block quantisation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Context
from lightning_commopt.compression.block_quantization import BlockQuantization, quantization_step
from lightning_commopt.compression.noise import rounding_noise

__all__ = ["Int8"]


@dataclass(frozen=True)
class Int8(BlockQuantization):
    """Signed 8-bit codes with one scale a block, with error feedback on both hops.

    ``s = bf16(max|v| / 127)``, ``q = round(v / s)``, decoded ``s q``. Block-wise quantisation as in
    Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), section 2; error feedback as in
    Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019), algorithm 2.

    Payload: ``n + 2 n / block`` bytes.

    When not to use it: on links so fast that encoding and decoding take longer than the three quarters of the bytes
    that it saves.

    Args:
        block: Elements that share a scale.
        stochastic: Round up or down at random so that the expectation is exact, ``q = floor(v / s + u)`` with ``u``
            uniform in [0, 1), drawn anew for each step, rank and element.
        seed: Seed of that noise.

    """

    name: ClassVar[str] = "int8"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "B"

    stochastic: bool = False
    seed: int = 0

    @property
    @override
    def bits(self) -> int:
        return 8

    @override
    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        largest = 126.5 if self.stochastic else 127.0  # room for rounding up
        step, inverse = quantization_step(values, largest, scales, context)
        code = torch.mul(values, inverse, out=context.scratch.get("code", values.shape, torch.float32))
        if self.stochastic:
            code.add_(rounding_noise(values.numel(), self.seed, context).view_as(code)).floor_()
        else:
            code.round_()
        codes.view(torch.int8).copy_(code)
        values.addcmul_(code, step, value=-1.0)

    @override
    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, context: Context) -> None:
        out.copy_(codes.view(torch.int8)).mul_(scales[:, None])
