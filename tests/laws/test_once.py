"""Law 3: whatever the shapes and the size of a bucket, every element is reduced exactly once in a round."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_commopt.selftest.once import lost_or_repeated
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


@dataclass(frozen=True)
class Model:
    """Shapes of parameters, bytes of a bucket, and the size from which tensors are compressed."""

    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int
    exact_below: int

    @property
    def named(self) -> dict[str, tuple[int, ...]]:
        """The shapes by name."""
        return {f"p{i}": shape for i, shape in enumerate(self.shapes)}


def models() -> st.SearchStrategy[Model]:
    """Models of up to eight small parameters, at least one of which has an element."""
    shape = st.one_of(
        st.lists(st.integers(1, 20), min_size=2, max_size=3),
        st.lists(st.integers(0, 300), max_size=1),
        st.lists(st.integers(0, 9), min_size=2, max_size=4),
    ).map(tuple)
    shapes = st.lists(shape, min_size=1, max_size=8).filter(lambda s: any(torch.Size(x).numel() for x in s)).map(tuple)
    return st.builds(Model, shapes, st.integers(4, 4000), st.sampled_from([0, 20, 1024]))


def wrong(case: Case, model: Model, device: str) -> list[str]:
    """The parameters of a model with an element that was lost, or counted twice, or took another's place."""
    found = lost_or_repeated(case, model.named, model.bucket_bytes / 2**20, model.exact_below, device)
    return [f"{name} of {model}" for name in found]


def wrong_in_batch(case: Case, batch: list[Model], device: str) -> list[str]:
    """The same for many models."""
    return [fault for model in batch for fault in wrong(case, model, device)]


@each_case_and_world(worlds=(3,))
@given(batch=st.lists(models(), min_size=12, max_size=12))
@settings(max_examples=2, phases=(Phase.generate,))  # the failing model is named: nothing is to be shrunk
def test_every_element_is_reduced_once(
    pool: WorkerPool, case: Case, world: int, device: str, batch: list[Model]
) -> None:
    assert pool.run(wrong_in_batch, world, case, batch, device) == [[]] * world
