"""The largest elements."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(Compression):
    """The ``k`` largest elements of each chunk with their places, with error feedback on both hops.

    ``k = max(1, round(density n))`` of ``n`` elements, whatever they are, so that the size of a message does not depend
    on the data: places as int32, ascending, then values as bfloat16 (what rounding drops stays in the residual). Aji
    and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017); Lin et al., "Deep Gradient
    Compression" (ICLR 2018). Owners add source by source in rank order and send the ``k`` largest of the mean.

    Payload: ``6 k`` bytes.

    When not to use it: with plain momentum or Adam and low density over few steps, since an element waits about
    ``1 / density`` steps to be sent; on a CPU with fast links, since selecting costs more than quantising.

    Args:
        density: Share of the elements that a round sends.

    """

    name: ClassVar[str] = "topk"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "C"

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("density", self.density, 0.0 < self.density <= 1.0, "above 0 and at most 1")

    def kept(self, numel: int) -> int:
        """Return ``k`` for a chunk of ``numel`` elements."""
        return max(1, round(self.density * numel)) if numel else 0

    @override
    def wire_bytes(self, numel: int) -> int:
        return 6 * self.kept(numel)

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        kept = self.kept(len(values))
        places, code = self._split(payload, kept)
        largest = torch.topk(values.abs(), kept, sorted=False).indices.sort().values
        chosen = values[largest]
        places.copy_(largest)
        code.copy_(chosen)
        values[largest] = chosen - code

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        places, code = self._split(payload, self.kept(len(out)))
        if not add:
            out.zero_()
        out.index_add_(0, places, code.float())

    def _split(self, payload: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        """Return places (int32) and values (bfloat16) of a payload as views."""
        return payload[: 4 * kept].view(torch.int32), payload[4 * kept :].view(torch.bfloat16)
