"""Models of transformers, built from a configuration, as their users train them."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.pipeline.test_tensor_parallel import MODELS
from tests.pipeline.toy import alone, distance, optimizer_of, piped, tokens
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt_pipeline", "models of transformers")

pytest.importorskip("transformers")

CASES: dict[int, list[tuple[str, bool, dict[str, Any]]]] = {
    2: [("gpt2", False, {}), ("gpt2", True, {"schedule": "gpipe"}), ("llama", False, {})],
    4: [(name, False, {"stages": 2, "tensor_parallel": 2, "plan": name}) for name in ("gpt2", "llama")],
}
"""By world size: the model, whether its blocks are recomputed, and options."""
data = partial(tokens, 3)


class Causal(pl.LightningModule):
    """The model computes its own loss.

    Args:
        name: Which one.
        recomputes: Whether its blocks are recomputed in the backward.
    """

    def __init__(self, name: str, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        model: Any = MODELS[name]()
        self.model = model.train()
        if recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    @override
    def configure_optimizers(self) -> Any:
        return optimizer_of(self, "sgd")


def fits(world: int) -> list[dict[str, Tensor]]:
    """All cases in one process: the import takes longer than they do."""
    return [
        piped(partial(Causal, name, recomputes=recomputes), data, {"microbatches": 4} | options).parameters
        for name, recomputes, options in CASES[world]
    ]


@pytest.mark.parametrize("world", CASES)
def test_parity(pool: WorkerPool, world: int) -> None:
    for states in pool.run(fits, world, world):
        for (name, recomputes, options), state in zip(CASES[world], states, strict=True):
            assert distance(state, alone(Causal(name), [data()])) < 1e-6, (name, recomputes, options)
