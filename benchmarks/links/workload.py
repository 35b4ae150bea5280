"""What is trained: a fixed model on fixed data, the same in every mode and on every machine."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "LEARNING_RATE", "batch", "initial_model", "loss_of"]

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 1024, 256, 4, 4, 64, 2
LEARNING_RATE = 1e-3


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same shape."""
        size, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(size, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, WIDTH))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """3,700,224 parameters: width 256, 4 layers, 1,024 words, 64 places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``(batch, length, vocabulary)`` of ``tokens``, shape ``(batch, length)``."""
        logits: Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places)))
        return logits


def initial_model() -> GPT:
    """Return the model with its initial weights, the same at every call and on every rank."""
    torch.manual_seed(0)
    return GPT()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, each of shape ``(batch, length)``: the place and the first word give the rest."""
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step * 1024 + rank))
    rest = (first * 3 + torch.arange(1, LENGTH + 1) * 7) % VOCABULARY
    words = torch.cat([first, rest], dim=1)
    return words[:, :-1], words[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a word."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
