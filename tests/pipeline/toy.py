"""Small models under a pipeline and in a single process."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from tests.pool import trainer
from tests.strategies.toy import loader

__all__ = ["CLASSES", "FEATURES", "Chain", "Outcome", "TinyGPT", "alone", "batches", "distance", "piped", "tokens"]

FEATURES, CLASSES = 6, 4


class Chain(pl.LightningModule):
    """A chain of linear layers with a classifier.

    Args:
        loss: ``"mean"`` or ``"sum"``.
        optimizer: ``"sgd"`` (momentum, two groups, a schedule) or ``"adamw"``.
        frozen: Blocks that do not train.
        depth: Number of blocks.
    """

    def __init__(self, *, loss: str = "mean", optimizer: str = "sgd", frozen: int = 0, depth: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(depth - 1)]
        self.layers = nn.ModuleList([*blocks, nn.Linear(FEATURES, CLASSES)])
        self.loss, self.optimizer = loss, optimizer
        for block in self.layers[:frozen]:
            block.requires_grad_(False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], reduction=self.loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return optimizer_of(self, self.optimizer)


class Attention(nn.Module):
    """A causal transformer block that is told the mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mlp(x)
        return mixed


class TinyGPT(pl.LightningModule):
    """A language model with a loose parameter, a mask that is made in `forward`, and tied weights.

    Args:
        tied: Whether the first and the last weight are one.
    """

    def __init__(self, *, tied: bool = True, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        width, vocabulary = 8, 13
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.optimizer = optimizer

    @override
    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embedding(ids) + self.places[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> Any:
        return optimizer_of(self, self.optimizer)


def optimizer_of(module: nn.Module, name: str) -> Any:
    """An optimizer of which it matters that groups, state and schedule are kept apart."""
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), 1e-2)
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int = 5, rows: int = 8, replica: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Classified points, others for each replica."""
    generator = torch.Generator().manual_seed(replica)
    return [
        (torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator))
        for _ in range(count)
    ]


def tokens(count: int = 5, rows: int = 8, replica: int = 0) -> list[Tensor]:
    """Sequences of tokens, of another length in each batch."""
    generator = torch.Generator().manual_seed(replica)
    return [torch.randint(0, 13, (rows, 7 + i % 2), generator=generator) for i in range(count)]


@dataclass
class Outcome:
    """What one rank saw of a fit.

    Args:
        parameters: By name, after it.
        metrics: `callback_metrics`.
        losses: What `on_train_batch_end` got.
        warnings: Texts of warnings of ours.
    """

    parameters: dict[str, Tensor]
    metrics: dict[str, float]
    losses: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def piped(
    model: Callable[[], pl.LightningModule],
    data: Callable[..., Sequence[Any]],
    strategy: dict[str, Any],
    ckpt_path: str | None = None,
    **options: Any,
) -> Outcome:
    """Fit a model in every rank of the run."""
    ours = CommOptPipelineStrategy(**strategy)
    losses = _Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitter = trainer(
            dist.get_world_size(),
            ours,
            **(
                {"max_epochs": 1, "use_distributed_sampler": False, "callbacks": [losses], "num_sanity_val_steps": 0}
                | options
            ),
        )
        module = model()
        replica = dist.get_rank() // ours.ranks_per_copy
        fitter.fit(module, loader(data(replica=replica)), ckpt_path=ckpt_path)
    return outcome(module, fitter, losses.seen, [str(w.message) for w in caught if "microbatch" in str(w.message)])


def outcome(module: nn.Module, fitter: pl.Trainer, losses: list[float], texts: list[str]) -> Outcome:
    """What is left of a fit."""
    values = {name: float(value) for name, value in fitter.callback_metrics.items()}
    return Outcome(copy.deepcopy(dict(module.state_dict())), values, losses, texts)


def alone(
    model: pl.LightningModule,
    data: Sequence[Sequence[Any]],
    *,
    accumulate: int = 1,
    clip: float = 0.0,
    clip_value: float = 0.0,
) -> Any:
    """Train a model in this process; the gradient is the mean over the replicas' batches.

    Args:
        model: Is trained.
        data: Batches of each replica.
        accumulate: Batches for a step.
        clip: Largest norm of the gradient.
        clip_value: Largest element of the gradient.
    """
    model.log = lambda *a, **k: None  # type: ignore[method-assign]
    made: Any = model.configure_optimizers()
    optimizer, scheduler = (
        (made["optimizer"], made["lr_scheduler"]["scheduler"]) if isinstance(made, dict) else (made, None)
    )
    steps = list(zip(*data, strict=True))
    for index, at_once in enumerate(steps):
        for batch in at_once:
            loss = model.training_step(batch, index)
            assert isinstance(loss, Tensor)
            (loss / len(at_once) / accumulate).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(steps):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if clip_value:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return model.state_dict()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any element of a state dict."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())
