"""Residual files of ranks that save into folders of their own, put together afterwards, as under Ray Train."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_commopt import Int8
from lightning_commopt.strategies import residual_checkpoint
from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import Regression, batches, loader, same_bits, state_of, strategy_of, tensors_of


def save(folder: Path) -> Any:
    """Train and save into a folder of this rank; its residuals."""
    vars(residual_checkpoint)["_INLINE_BYTES"] = 0
    strategy = strategy_of(Case(Int8()))
    strategy._checkpoint.own_folders = True
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    fitter.fit(Regression(), loader(batches(2)))
    fitter.save_checkpoint(folder / str(dist.get_rank()) / "checkpoint.ckpt")
    return state_of(strategy)["first"]


def load(path: Path) -> Any:
    """Residuals after a fit that has nothing left to do."""
    strategy = strategy_of(Case(Int8()))
    trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False).fit(
        Regression(), loader(batches(2)), ckpt_path=path
    )
    return state_of(strategy)["first"]


def test_each_rank_writes_its_file_into_its_own_folder(pool: WorkerPool, tmp_path: Path) -> None:
    saved = pool.run(save, 2, tmp_path)
    names = {rank: sorted(path.name for path in (tmp_path / str(rank)).iterdir()) for rank in range(2)}
    assert [name.rsplit("-", 1)[-1] for name in names[0]] == ["checkpoint.ckpt", "rank00000.pt"]
    assert [name.rsplit("-", 1)[-1] for name in names[1]] == ["rank00001.pt"]
    shutil.copytree(tmp_path / "1", tmp_path / "0", dirs_exist_ok=True)
    for ours, before in zip(pool.run(load, 2, tmp_path / "0" / "checkpoint.ckpt"), saved, strict=True):
        assert same_bits(ours, before)
        assert any(part.any() for part in tensors_of(before))
