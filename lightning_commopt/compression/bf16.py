"""bfloat16 on the wire."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context

__all__ = ["BF16"]


@dataclass(frozen=True)
class BF16(Compression):
    """Casts to bfloat16 and adds in fp32.

    ``payload = bf16(v)``: 8 bits of exponent, so nothing over- or underflows, and a relative error of at most ``2^-8``
    a cast. Payloads are decoded before they are added: a sum on the wire in bfloat16 loses accuracy with the number of
    ranks, this one does not. It is a cast, so there is no error feedback: the mean of ``W`` ranks errs by at most
    ``2^-8`` times the mean of the magnitudes, once more when there is a second hop.

    Payload: ``2 n`` bytes.

    When not to use it: inside a node with fast links, where the cast costs more than the bytes it saves.
    """

    name: ClassVar[str] = "bf16"
    error_feedback: ClassVar[bool] = False
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "A"

    @override
    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        code = payload.view(torch.bfloat16)
        code.copy_(values)
        values.sub_(code)

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        code = payload.view(torch.bfloat16)
        if add:
            out.add_(code)
        else:
            out.copy_(code)
