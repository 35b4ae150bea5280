"""The memory that a run announces is about what it takes."""

from math import prod

import pytest

from lightning_commopt.selftest.engine import engine, gradients_of
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

SHAPES = {"a": (256, 256), "bias": (300,), "b": (256, 100), "c": (120, 300), "d": (400, 90)}


def memory(case: Case, device: str) -> tuple[int, int]:
    """Bytes that were announced, and bytes that are held after two rounds."""
    with engine(case, SHAPES, cap=0.1, device=device) as made:
        made.step(gradients_of(made.rank, 0, SHAPES))
        largest = max(sum(prod(SHAPES[name]) for name in bucket) for bucket in made.buckets)
        made.step(gradients_of(made.rank, 1, SHAPES))
        assert len(made.buckets) >= 3
        return made.path.expected_memory_bytes(largest), made.path.stats().memory_bytes


@each_case_and_world(worlds=(2, 3), which=lambda case: case.method.name != "none")
def test_announced_is_about_held(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    for announced, held in pool.run(memory, world, case, device):
        assert 0.65 * held <= announced <= 1.3 * held  # small buckets: working memory of fixed size is not announced
