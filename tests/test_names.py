"""The strategy is found by name in fresh interpreters, whatever else was imported, and says so where it cannot be."""

import os
import subprocess
import sys
from pathlib import Path

ONLY_LIGHTNING = """
import sys
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

cpu = {"accelerator": "cpu", "devices": 2, "logger": False}

# Not imported: Lightning's own error.
with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy='commopt'`"):
    Trainer(strategy="commopt", **cpu)

# LightningCLI imports what a class path names, and then knows the names too.
assert "lightning_commopt" not in sys.modules
config = {"strategy": "commopt_int8", "callbacks": [{"class_path": "lightning_commopt.callbacks.CommMonitor"}]}
cli = LightningCLI(BoringModel, args={"trainer": config | cpu}, run=False, seed_everything_default=False)
assert cli.trainer.strategy.compression.name == "int8"

# Imported: each name gives our strategy.
import lightning_commopt
assert type(Trainer(strategy="commopt", **cpu).strategy) is lightning_commopt.CommOptStrategy
assert repr(lightning_commopt.CommOptStrategy("bf16")) == "CommOptStrategy(compression=BF16(exact_below=1024))"

# The other Lightning, imported after us.
assert "pytorch_lightning" not in sys.modules
import pytorch_lightning
for name in ("commopt", "commopt_int8", "commopt_topk_spawn"):
    with pytest.raises(TypeError, match=f"`strategy='{name}'` is for `lightning.pytorch`.*from lightning.pytorch imp"):
        pytorch_lightning.Trainer(strategy=name, **cpu)
strategy = lightning_commopt.CommOptStrategy("int8")
with pytest.raises(ValueError, match="a strategy for `lightning.pytorch`: write `from lightning.pytorch import Trai"):
    pytorch_lightning.Trainer(strategy=strategy, **cpu)
other = pytorch_lightning.Trainer(strategy="ddp", **cpu).strategy
assert type(other) is pytorch_lightning.strategies.DDPStrategy
assert Trainer(strategy=strategy, **cpu).strategy is strategy
"""

BOTH_LIGHTNINGS_AND_NO_JSONARGPARSE = """
import sys
sys.modules["jsonargparse"] = None  # as if it was not installed
import pytest
import pytorch_lightning
import lightning
import lightning_commopt
import lightning_commopt.callbacks
from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

cpu = {"accelerator": "cpu", "devices": 2, "logger": False}
lightning_commopt.strategies.register()  # a second time
strategy = lightning.Trainer(strategy="commopt_powersgd", **cpu).strategy
assert strategy.compression == lightning_commopt.PowerSGD()
with pytest.raises(TypeError, match="`strategy='commopt'` is for `lightning.pytorch`"):
    pytorch_lightning.Trainer(strategy="commopt", **cpu)
with pytest.raises(TypeError, match="pytorch_lightning.*single import style"):
    lightning.Trainer(strategy="commopt", **cpu).fit(OtherModel())
"""


def test_fresh_interpreters(tmp_path: Path) -> None:
    """Both at once: nearly all of their time is spent importing, on one core."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    interpreters = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script in (ONLY_LIGHTNING, BOTH_LIGHTNINGS_AND_NO_JSONARGPARSE)
    ]
    try:
        for interpreter in interpreters:
            output, _ = interpreter.communicate(timeout=100)
            assert interpreter.returncode == 0, output
    finally:
        for interpreter in interpreters:
            interpreter.kill()
            interpreter.wait()
