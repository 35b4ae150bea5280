"""The life of a sharded run: a rank that dies, uneven data, checkpoints that come and go, the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_commopt import CommOptShardedStrategy, Int4, Int8
from tests.failure.test_faults import QUICK, Sick, failures
from tests.pool import WorkerPool
from tests.strategies.sharded_toy import ShardedFit, fit_sharded, sharded
from tests.strategies.test_sharded import Logging
from tests.strategies.toy import Regression, batches

pytestmark = pytest.mark.runs("commopt_hsdp", "fit, validate, failures, restarts")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}


# ---- ranks that differ ----------------------------------------------------------------------------------------------


def die() -> None:
    strategy = sharded("int8", shard_gather="int8")
    strategy._limits = QUICK
    fit_sharded(strategy, Sick("kill"), batches(6))


def test_a_killed_rank_ends_all(pool: WorkerPool) -> None:
    found, said = failures(pool, die, 4, **NODES)
    assert found[1][0] == "WorkerDied"
    for rank in (0, 2, 3):
        assert found[rank][0] == "RankFailure"
        assert found[rank][1].startswith("rank 1, in training_step of step 2, ended without a word (pid ")
    assert said == [f"commopt: {found[0][1]}"]


def trim(counts: tuple[int, ...]) -> tuple[ShardedFit, ShardedFit]:
    data = batches(max(counts))
    uneven = fit_sharded(sharded("int8", uneven="trim"), Regression(), data[: counts[dist.get_rank()]])
    return uneven, fit_sharded(sharded("int8"), Regression(), data[: min(counts)])


def test_trimmed_is_as_if_no_rank_had_more(pool: WorkerPool) -> None:
    ranks = pool.run(trim, 4, (5, 3, 4, 5), **NODES)
    for uneven, even in ranks:
        assert uneven.steps == even.steps == 3
        assert torch.equal(uneven.parameters, even.parameters)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def keep_best(folder: Path, shards: bool) -> tuple[str, str, ShardedFit, Tensor]:
    """Four epochs, of which the best two and the last are kept; and the last one resumed for a fifth."""
    data = batches(2)
    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    options: dict[str, Any] = {"validation": data, "enable_checkpointing": True, "max_epochs": 4}
    method = {"save_distributed_checkpoint": shards, "shard_scatter": "int8"}
    through = fit_sharded(sharded("int8", **method), Logging(), data, callbacks=[saver], **options)
    again = fit_sharded(sharded("int8", **method), Logging(seed=1), data, saver.last_model_path, max_epochs=4)
    return saver.best_model_path, saver.last_model_path, through, again.parameters


@pytest.mark.parametrize("shards", [True, False])
def test_the_best_and_the_last_checkpoint_are_kept(pool: WorkerPool, tmp_path: Path, shards: bool) -> None:
    ranks = pool.run(keep_best, 4, tmp_path, shards, **NODES)
    best, last, through, again = ranks[0]
    assert all(rank[:2] == (best, last) for rank in ranks)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"], "the loss falls from epoch to epoch"
    assert Path(best).name == "epoch=3.ckpt"
    assert Path(last).is_dir() == shards
    assert torch.equal(again, through.parameters)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI  # needs jsonargparse

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          accelerator: cpu
          devices: 2
          logger: false
          strategy:
            class_path: lightning_commopt.CommOptShardedStrategy
            init_args:
              compression: {class_path: Int4, init_args: {block: 64}}
              wrap: [Linear, torch.nn.LayerNorm]
              shard_gather: {class_path: Int8, init_args: {stochastic: true}}
              shard_scatter: bf16
              hierarchy: 2
              residuals: mean
              save_distributed_checkpoint: false
        """
    )
    cli = LightningCLI(BoringModel, args=[f"--config={config}"], run=False, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, CommOptShardedStrategy)
    assert strategy.compression == Int4(block=64)
    assert strategy.wrap in (["Linear", torch.nn.LayerNorm], ["Linear", "torch.nn.LayerNorm"])
    assert strategy.shard_gather == Int8(stochastic=True)
    assert strategy.shard_scatter is not None
    assert strategy.shard_scatter.name == "bf16"
    assert (strategy.hierarchy, strategy._checkpoint.policy) == (2, "mean")
    assert not strategy._save_distributed_checkpoint
