"""Replicas, stages and slices together train as one process does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptPipelineStrategy
from lightning_commopt.pipeline.tensor_parallel import TensorParallel
from tests.pipeline.eight import LIMIT_S, WORLD
from tests.pipeline.grid import CLIP, DIVIDED, SmallGPT, data
from tests.pipeline.toy import alone, distance, piped
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader

pytestmark = pytest.mark.runs("commopt_pipeline", "with data parallel")

TOLERANCE = 1e-6


def expected(replicas: int, **options: Any) -> Any:
    """The weights that one process gets."""
    return alone(SmallGPT(), [data(replica=replica) for replica in range(replicas)], **options)


GRIDS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 1}),
    (4, {"stages": 2}),
    (4, {"stages": 2, "schedule": "zbv"}),
    (4, {"stages": 1}),
]


@pytest.mark.parametrize(("world", "options"), GRIDS)
def test_slices(pool: WorkerPool, world: int, options: dict[str, Any]) -> None:
    outcomes = pool.run(piped, world, SmallGPT, data, {"microbatches": 4, **DIVIDED, **options}, gradient_clip_val=CLIP)
    reference = expected(world // 2 // options["stages"], clip=CLIP)
    for outcome in outcomes:
        assert distance(outcome.parameters, reference) < TOLERANCE


def counted_twice() -> dict[str, Tensor]:
    """Each rank counts what all have alike in the norm."""
    TensorParallel.counts = lambda self, name: True  # type: ignore[method-assign]
    return piped(SmallGPT, data, {"stages": 2, "microbatches": 4, **DIVIDED}, gradient_clip_val=CLIP).parameters


def test_a_wrong_norm_is_noticed(pool: WorkerPool) -> None:
    assert max(distance(state, expected(1, clip=CLIP)) for state in pool.run(counted_twice, 4)) > 100 * TOLERANCE


def half(folder: Path, options: dict[str, Any] | None, first: bool) -> dict[str, Tensor]:
    """Train one batch and save, or load and train the other two; with validation before, in between and after."""
    strategy: Any = "ddp" if options is None else CommOptPipelineStrategy(microbatches=4, **options)
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1 if first else 2, use_distributed_sampler=False)
    module, path = SmallGPT(), folder / "half.ckpt"
    batches, held_out = (data()[:1] if first else data()[1:]), data()[:1]
    fitter.fit(module, loader(batches), loader(held_out), ckpt_path=None if first else path)
    if first:
        fitter.save_checkpoint(path)
        fitter.validate(module, loader(held_out), verbose=False)
    return dict(module.state_dict())


def test_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    """Saved in one form and loaded in any other."""
    forms: dict[str, tuple[int, dict[str, Any] | None]] = {
        "plain": (1, None),
        "grid": (4, {"stages": 2, **DIVIDED}),
        "stages": (2, {}),
    }
    reference = expected(1)
    for source, targets in {"plain": ["grid"], "grid": ["plain", "grid"], "stages": ["grid"]}.items():
        world, options = forms[source]
        pool.run(half, world, tmp_path / source, options, True)
        for target in targets:
            world, options = forms[target]
            for state in pool.run(half, world, tmp_path / source, options, False):
                assert distance(state, reference) < TOLERANCE, (source, target)


@pytest.mark.timeout(LIMIT_S + 30)
def test_two_by_two_by_two(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pipeline.eight", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S + 15, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reference = expected(2, clip=CLIP)
    for rank in range(WORLD):
        assert distance(torch.load(tmp_path / f"{rank}.pt"), reference) < TOLERANCE
    assert distance(torch.load(tmp_path / "eight.ckpt")["state_dict"], reference) < TOLERANCE
