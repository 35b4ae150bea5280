"""A small byte-level GPT and its text: the model and data of the examples and of ``commopt demo``.

Plain PyTorch and Lightning. The text is what every Python has on disk: the language reference behind ``help()`` and the
sources of the standard library. Nothing is downloaded. Another Python version has a slightly different text: compare
losses within one version.
"""

import math
import sysconfig
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

VOCABULARY = 256
LENGTH = 128
"""Bytes that the model sees at once."""


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Apply rotary position embedding (https://arxiv.org/abs/2104.09864) to ``x`` of shape [..., length, features]."""
    length, features = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.outer(torch.arange(length, device=x.device), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """A transformer block with attention and MLP side by side, as in Pythia (https://arxiv.org/abs/2304.01373)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length, width] to the same shape."""
        q, k, v = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, length, features]
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        output: Tensor = x + self.attention_out(attended.transpose(1, 2).flatten(2)) + self.mlp(x)
        return output


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes; 4.1 M parameters with the defaults.

    Args:
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Attention heads of a block; must divide ``width``.

    """

    def __init__(self, width: int = 256, depth: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to the logits [batch, length, 256] of each next byte."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return logits


class LitByteGPT(L.LightningModule):
    """Train a :class:`ByteGPT` with AdamW, linear warm-up and cosine decay.

    Logs ``train_loss`` (of this process) and ``val_loss`` (mean over all processes), both in nats a byte.

    Args:
        lr: Peak learning rate.
        warmup: Fraction of all steps spent warming up.

    """

    def __init__(self, lr: float = 1.5e-3, warmup: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.warmup = warmup
        self.model = ByteGPT()

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy of each byte of windows [batch, length + 1] given those before it."""
        logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return and log the loss of one batch of windows."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss of one batch of held-out windows."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build AdamW and its schedule over all steps of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        total = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, round(self.warmup * total))

        def factor(step: int) -> float:
            progress = max(0, step - warmup) / max(1, total - warmup)
            return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * progress)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByteWindows(Dataset[Tensor]):
    """Windows of consecutive bytes, each as a tensor [length + 1]: the inputs and, one byte on, the targets.

    Args:
        documents: The texts, read one after another.
        length: Bytes that the model sees; windows lie side by side.

    """

    def __init__(self, documents: list[bytes], length: int) -> None:
        self.text = torch.frombuffer(bytearray(b"\n".join(documents)), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


def split_documents(every: int = 16) -> tuple[list[bytes], list[bytes]]:
    """Read the text (about 5 MB) in a fixed order and hold out one document in ``every`` for validation.

    Returns:
        Training documents and validation documents.

    """
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    documents = [topics[name].encode() for name in sorted(topics)] + [path.read_bytes() for path in sources]
    train = [document for i, document in enumerate(documents) if i % every]
    return train, documents[::every]


def loaders(batch_size: int, val_windows: int = 256) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Return batches for training, shuffled, and an even sample of the held-out text, the same in every run.

    Args:
        batch_size: Windows of 128 bytes that a process gets in a step.
        val_windows: Held-out windows.

    """
    train, val = (ByteWindows(documents, LENGTH) for documents in split_documents())
    sample = Subset(val, range(0, len(val), len(val) // val_windows)[:val_windows])
    return DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True), DataLoader(sample, batch_size=16)


def quiet() -> None:
    """Leave out two warnings that a script could do nothing about, or that are no problem for these data."""
    # Lightning's own use of a deprecated PyTorch check.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # A batch is a few slices of a tensor in memory: worker processes would only take cores from the training.
    warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")
