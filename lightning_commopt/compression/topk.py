"""The largest elements."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context
from lightning_commopt.compression.bits import pack_bits, unpack_bits
from lightning_commopt.compression.kernels import kernel_for

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(Compression):
    """The ``k`` largest elements of each chunk with their places, with error feedback on both hops.

    ``k = max(1, round(density n))`` of ``n`` elements, whatever they are, so that the size of a message does not depend
    on the data: places, ascending, as int32 or as one bit an element, whichever is smaller, then values as bfloat16
    (what rounding drops stays in the residual). Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent" (EMNLP 2017); Lin et al., "Deep Gradient Compression" (ICLR 2018). Owners add source by source in rank
    order and send the ``k`` largest of the mean.

    Payload: ``min(4 k, n / 8) + 2 k`` bytes.

    When not to use it: with plain momentum or Adam and low density over few steps, since an element waits about
    ``1 / density`` steps to be sent; on a CPU with fast links, since selecting costs more than quantising.

    Args:
        density: Share of the elements that a round sends. The default is the smallest that stayed within 2 % of the
            loss over a run of 600 steps (benchmarks/README.md); runs that are a hundred times as long bear 0.01.

    """

    name: ClassVar[str] = "topk"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "C"
    default_start_step: ClassVar[int] = 60

    density: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("density", self.density, 0.0 < self.density <= 1.0, "above 0 and at most 1")

    @property
    @override
    def alignment(self) -> int:
        return 16  # a bit an element is then a whole number of bfloat16

    def kept(self, numel: int) -> int:
        """Return ``k`` for a chunk of ``numel`` elements."""
        return max(1, round(self.density * numel)) if numel else 0

    @override
    def wire_bytes(self, numel: int) -> int:
        """``min(4 k, n / 8) + 2 k``."""
        kept = self.kept(numel)
        return min(4 * kept, numel // 8) + 2 * kept

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        kept = self.kept(len(values))
        places, code = self._split(payload, len(values))
        if kept and (kernel := kernel_for(self, values, code)):
            kernel.encode(values, places, code)
            return
        largest = torch.topk(values.abs(), kept, sorted=False).indices.sort().values
        chosen = values[largest]
        if places.dtype == torch.int32:
            places.copy_(largest)
        else:
            mask = context.scratch.get("mask", values.shape, torch.bool).zero_()
            pack_bits(mask.index_fill_(0, largest, True), places)
        code.copy_(chosen)
        values[largest] = chosen - code

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        places, code = self._split(payload, len(out))
        if kernel := kernel_for(self, out, code):
            kernel.decode(places, code, out, add)
            return
        if places.dtype == torch.int32:
            if not add:
                out.zero_()
            out.index_add_(0, places, code.float())
            return
        mask = unpack_bits(places, context.scratch).bool()
        if add:
            spread = context.scratch.get("spread", out.shape, torch.float32).zero_()
            out.add_(spread.masked_scatter_(mask, code.float()))
        else:
            out.zero_().masked_scatter_(mask, code.float())

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return places (int32, or uint8 of a bit an element) and values (bfloat16) of a payload as views."""
        kept = self.kept(numel)
        at = self.wire_bytes(numel) - 2 * kept
        places, code = payload[:at], payload[at:].view(torch.bfloat16)
        return (places.view(torch.int32) if at == 4 * kept else places), code
