"""A module that was made without weights gets them in stages, and no rank ever has all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptPipelineStrategy
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.materialise import materialise
from tests.pipeline.toy import CLASSES, FEATURES, alone, batches, distance
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader

pytestmark = pytest.mark.runs("commopt_pipeline", "models made on the meta device")


class Loose(nn.Module):
    """An offset that its module knows how to begin with."""

    def __init__(self, *, resets: bool = True) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.empty(FEATURES))
        self.steps: Tensor
        self.register_buffer("steps", torch.arange(FEATURES))
        if resets:
            self.reset_parameters = self._begin

    def _begin(self) -> None:
        nn.init.normal_(self.offset, std=0.1)
        torch.arange(FEATURES, out=self.steps)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset + 0.01 * self.steps


class Bare(LightningModule):
    """Tied first and last weights, a batch norm, and blocks, all made in `configure_model`.

    Args:
        resets: Whether every module can give its weights values.
    """

    def __init__(self, *, resets: bool = True) -> None:
        super().__init__()
        self.resets = resets
        self.layers: nn.ModuleList | None = None

    @override
    def configure_model(self) -> None:
        if self.layers is not None:
            return
        torch.manual_seed(5)
        with torch.device("meta"):
            self.first = nn.Linear(FEATURES, FEATURES)
            blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)) for _ in range(5)]
            self.layers = nn.ModuleList([*blocks, Loose(resets=self.resets)])
            self.last = nn.Linear(FEATURES, FEATURES)
            self.last.weight = self.first.weight
            self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        assert self.layers is not None
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.last(x))
        return result

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.held = held(self)


def held(module: nn.Module) -> dict[str, int]:
    """Elements of the parameters that have values of their own."""
    named = module.named_parameters()
    return {name: p.numel() for name, p in named if not p.is_meta and p.stride() != (0,) * p.ndim}


def whole() -> Bare:
    """The module with all weights in one process."""
    module = Bare()
    module.configure_model()
    names = {id(p): name for name, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
    materialise(module, names, torch.device("cpu"), 5)
    return module


Fitted = tuple[dict[str, int], dict[str, int], dict[str, float]]


def fitted(folder: Path, stages: int, count: int, options: dict[str, Any]) -> Fitted:
    """What this rank held in a fit and after it, and what it measures then. One microbatch: batch norms see them."""
    strategy = CommOptPipelineStrategy(stages, 1, **options)
    own = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    module = Bare()
    data = batches(5)
    own.fit(module, loader(data[:count]))
    own.save_checkpoint(folder / "a.ckpt")
    after = held(module)
    (values,) = own.validate(module, loader(data), verbose=False)
    strategy = CommOptPipelineStrategy(stages, 1, **options)
    again = trainer(dist.get_world_size(), strategy, max_epochs=2, use_distributed_sampler=False)
    other = Bare()
    again.fit(other, loader(data[count:]), ckpt_path=folder / "a.ckpt")
    again.save_checkpoint(folder / "b.ckpt")
    return module.held, after, dict(values)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("world", "stages", "options"), [(2, 2, {}), (2, 2, {"schedule": "zbv"}), (4, 2, {}), (3, 3, {"cuts": [1, 4]})]
)
def test_stages_are_those_of_the_whole(
    pool: WorkerPool, tmp_path: Path, world: int, stages: int, options: dict[str, Any]
) -> None:
    outcomes = pool.run(fitted, world, tmp_path, stages, 3, options)
    sizes = {name: p.numel() for name, p in whole().named_parameters()}
    for during, after, values in outcomes:
        assert sum(during.values()) == sum(after.values())
        assert sum(during.values()) < sum(sizes.values())
        assert values == outcomes[0][2]
    together: dict[str, int] = {}
    for during, _, _ in outcomes[:stages]:
        together |= during
    assert together.keys() == sizes.keys()
    for name, count in (("a", 3), ("b", 5)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        expected = alone(whole(), [batches(5)[:count]])
        assert distance(saved["state_dict"], expected) < 1e-6
    plain = whole()
    plain.load_state_dict(saved["state_dict"])


def refused() -> str:
    """The message of a module that cannot begin."""
    own = trainer(2, CommOptPipelineStrategy(2, 2), max_epochs=1, use_distributed_sampler=False)
    try:
        own.fit(Bare(resets=False), loader(batches(2)))
    except PipelineError as error:
        return str(error)
    except Exception as error:  # of the other rank
        return f"other: {error}"
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_that_cannot_begin_is_named(pool: WorkerPool) -> None:
    texts = pool.run(refused, 2)
    message = r"`layers.5.(offset|steps)` is on the meta device, and its `Loose` has no `reset_parameters`"
    assert all(re.search(message, text) for text in texts), texts


class Half(nn.Linear):
    """Sets its weight alone."""

    @override
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_what_stays_unset_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Half(2, 2))
    with pytest.raises(PipelineError, match=r"`0.bias` .* of its `Half` does not set all of it"):
        materialise(module, {}, torch.device("cpu"), 0)


def test_values_depend_on_names_alone() -> None:
    one, other = whole(), whole()
    with torch.device("meta"):
        first, head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        alone_ = nn.ModuleDict({"first": first, "head": head})
    state = {"head.bias": torch.ones(CLASSES)}
    materialise(alone_, {}, torch.device("cpu"), 5, state)
    assert distance(dict(one.state_dict()), dict(other.state_dict())) == 0
    assert torch.equal(first.weight, one.first.weight)
    assert torch.equal(head.weight, one.head.weight)
    assert torch.equal(head.bias, state["head.bias"])
    assert one.last.weight is one.first.weight
