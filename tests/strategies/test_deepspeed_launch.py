"""DeepSpeed in real processes: torchrun and Lightning's own launcher, from YAML, up to a killed rank."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from tests.strategies import zero_launched
from tests.strategies.zero_launched import ONE_FILE, STEPS, Net, loader

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.runs("commopt_deepspeed", "launch by torchrun and Lightning"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(zero_launched.__file__))
LIMIT = 150.0
"""Seconds until everything is killed."""

CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_commopt.CommOptDeepSpeedStrategy
    init_args:
      stage: {stage}
      compression: int8
      start_step: 0
  callbacks:
    class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args:
      dirpath: {folder}
      monitor: val_loss
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(command: list[str], stage: int, folder: Path) -> "subprocess.Popen[str]":
    """Start a launch in a session of its own."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.format(stage=stage, folder=folder))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [*command, SCRIPT, str(folder / "config.yaml"), str(folder)],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JSONARGPARSE_DEPRECATION_WARNINGS": "off"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
def test_launches_end_to_end(tmp_path: Path) -> None:
    """Both launchers at once. One is at stage 2, the other at stage 3."""
    launches = {"torchrun": (TORCHRUN, 2), "lightning": ([sys.executable], 3)}
    started = {name: start(*launch, tmp_path / name) for name, launch in launches.items()}
    outputs = {}
    try:
        for name, process in started.items():
            outputs[name], _ = process.communicate(timeout=LIMIT)
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    for name, output in outputs.items():
        folder = tmp_path / name
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        assert ranks[0] == ranks[1], output
        assert ranks[0]["steps"] == 2 * STEPS
        assert ranks[0]["ratio"] > 2
        assert f"stage {launches[name][1]} on 2 ranks; method `Int8" in output
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        plain = Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
        (row,) = plain.validate(Net(), loader(9, 2), ckpt_path=folder / ONE_FILE, verbose=False)
        assert row["val_loss"] == pytest.approx(ranks[0]["val_loss"], rel=1e-5)
        assert started[name].returncode != 0, output
        assert not (folder / "not_ended").exists()
        assert re.search(r"commopt: rank 1, .* ended without a word", output), output
