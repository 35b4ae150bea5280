"""No compression."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context

__all__ = ["Uncompressed"]


@dataclass(frozen=True)
class Uncompressed(Compression):
    """fp32 gradients, summed on the wire.

    As the method of a run it means DDP's own reducer, with no hook at all. As the dense rounds before another method's
    ``start_step`` it sends residual and gradient exactly, which clears the residual.

    Payload: ``4 n`` bytes.
    """

    name: ClassVar[str] = "none"
    error_feedback: ClassVar[bool] = False
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "A"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    @override
    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        payload.copy_(values)
        values.zero_()

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        if add:
            out.add_(payload)
        else:
            out.copy_(payload)
