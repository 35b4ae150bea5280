"""What is to be trained, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isqrt
from typing import Literal, get_args

__all__ = ["Attention", "Model", "Optimizer", "Precision", "Training"]

Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true"]
"""As ``Trainer(precision=...)`` has it."""
Optimizer = Literal["adamw", "sgd"]
"""``"sgd"`` has momentum."""
Attention = Literal["flash", "stored"]
"""``"stored"``: the scores of all pairs are kept for backward, as without a fused kernel."""

_RANGES = {
    "params": (1, 10**16),
    "layers": (1, 2000),
    "hidden": (1, 10**7),
    "heads": (1, 10**6),
    "sequence": (1, 10**9),
    "vocabulary": (0, 10**9),
}
_HIDDEN_PER_LAYER = 100  # GPT-3's models have 64 to 128 (Brown et al. 2020, table 2.1)
_HEAD = 128


def _check(name: str, value: int) -> None:
    least, most = _RANGES[name]
    if value < least:
        raise ValueError(f"`{name}={value}` must be at least {least}.")
    if value > most:
        raise ValueError(f"`{name}={value}` must be at most {most}.")


@dataclass(frozen=True)
class Model:
    """A transformer, or something as large.

    Args:
        params: Trainable parameters.
        layers: Blocks.
        hidden: Width.
        heads: Of attention.
        sequence: Tokens of a sample.
        vocabulary: Size of the output layer; 0: none.

    """

    params: int
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for name in _RANGES:
            _check(name, getattr(self, name))

    @classmethod
    def shaped(
        cls,
        params: int,
        *,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
        sequence: int = 2048,
        vocabulary: int = 50257,
    ) -> "Model":
        """Return a model of which not all is known: shaped like GPT-3's, ``12 layers hidden^2`` parameters in blocks.

        Args:
            params: Trainable parameters.
            layers: Blocks; None: a hundredth of the width.
            hidden: Width; None: what the parameters allow for.
            heads: Of attention; None: about one for 128 of the width.
            sequence: Tokens of a sample.
            vocabulary: Size of the output layer.

        """
        for name, value in (("params", params), ("layers", layers), ("hidden", hidden)):
            if value is not None:
                _check(name, value)
        if layers is None:
            by_shape = (params / 12 / _HIDDEN_PER_LAYER**2) ** (1 / 3)
            layers = max(1, round(by_shape if hidden is None else params / 12 / hidden**2))
        if hidden is None:
            hidden = max(8, isqrt(params // 12 // layers) // 8 * 8)
        if heads is None:
            heads = max(1, round(hidden / _HEAD))
            heads = heads if heads < 8 else round(heads / 8) * 8  # so that tensor parallel can divide them
        return cls(params, layers, hidden, heads, sequence, vocabulary)

    @property
    def layer_params(self) -> int:
        """Parameters of a block, all of them shared out."""
        return -(-self.params // self.layers)

    @cached_property
    def matrices(self) -> Sequence[tuple[int, int]]:
        """Shapes of the matrices of a block, scaled so that all parameters of the model are in blocks."""
        h = self.hidden
        shapes = [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)]
        scale = (self.layer_params / sum(rows * columns for rows, columns in shapes)) ** 0.5
        return [(max(1, round(rows * scale)), max(1, round(columns * scale))) for rows, columns in shapes]

    def flops(self, samples: float) -> float:
        """Return the operations of forward and backward: 6 a parameter and token, and those of attention's scores.

        Narayanan et al. (arXiv 2104.04473), appendix, without recomputing and with all parameters in matrices.

        Args:
            samples: In a step.

        """
        tokens = samples * self.sequence
        return tokens * (6.0 * self.params + 12.0 * self.layers * self.hidden * self.sequence)


@dataclass(frozen=True)
class Training:
    """How it is trained.

    Args:
        global_batch: Samples of a step, on all devices together.
        precision: The Trainer's.
        optimizer: Its state takes memory.
        checkpointing: Whether blocks are computed again in backward instead of keeping what is inside them.
        attention: What backward finds of attention.
        compute_ms: Forward and backward of ``compute_samples`` samples on one device, measured. None: from its speed.
        compute_samples: See there.
        activation_bytes: Of one sample on one device, measured. None: from the model's shape.

    """

    global_batch: int
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    checkpointing: bool = False
    attention: Attention = "flash"
    compute_ms: float | None = None
    compute_samples: float = 1.0
    activation_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"`global_batch={self.global_batch}` must be at least 1.")
        for name in ("compute_ms", "compute_samples", "activation_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"`{name}={value}` must be above 0.")
        for name, words in (("precision", Precision), ("optimizer", Optimizer), ("attention", Attention)):
            if getattr(self, name) not in get_args(words):
                known = ", ".join(map(repr, get_args(words)))
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {known}.")

    @property
    def activation_size(self) -> int:
        """Bytes of an activation, and of a parameter while it is used."""
        return 4 if self.precision == "32-true" else 2

    @property
    def weight_size(self) -> int:
        """Bytes of a parameter, and of its gradient: mixed precision keeps both in fp32."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps of a parameter."""
        return 2 if self.optimizer == "adamw" else 1
