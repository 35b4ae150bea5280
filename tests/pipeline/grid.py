"""A small GPT on a grid of replicas, stages and slices."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_commopt.demo.byte_gpt import ByteGPT
from tests.pipeline.toy import optimizer_of, tokens

__all__ = ["CLIP", "DIVIDED", "SmallGPT", "data"]

CLIP = 0.1
DIVIDED: dict[str, Any] = {"tensor_parallel": 2, "plan": "byte_gpt"}
data = partial(tokens, 3)


class SmallGPT(pl.LightningModule):
    """The model of the examples, small.

    Args:
        tied: Whether the first and the last weight are one.
    """

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ByteGPT(width=16, depth=4, heads=4)
        if tied:
            self.model.head.weight = self.model.embedding.weight

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    @override
    def configure_optimizers(self) -> Any:
        return optimizer_of(self, "sgd")
