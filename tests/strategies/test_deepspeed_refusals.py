"""What DeepSpeed would ignore or crash on is one sentence before launch."""

import importlib.util
import json
import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_commopt import CommOptDeepSpeedStrategy, CommOptStrategy, Int4, Int8
from lightning_commopt.zero.checks import check_method, check_version
from lightning_commopt.zero.config import add_zero_plus_plus

pytestmark = pytest.mark.runs("commopt_deepspeed", "options refused")

INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason="deepspeed is not installed")
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """DeepSpeed warns at import."""
    if INSTALLED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed")


def zero(**options: Any) -> dict[str, Any]:
    return {"config": {"zero_optimization": options}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "1-bit optimizer": ({"config": {"optimizer": {"type": "OneBitAdam"}}}, "removed its 1-bit optimizers"),
    "1-bit both": ({"compression": "onebit", "config": {"optimizer": {"type": "ZeroOneAdam"}}}, "ZeroOneAdam.*onebit"),
    "1-bit by name": ({"compression": "1-bit-Adam"}, "set `compression='onebit'`"),
    "hpz and offload": ({"stage": 3, "offload_parameters": True, "config": HPZ}, "DeepSpeed cannot do both"),
    "hpz below 3": ({"stage": 2, "config": HPZ}, "`zero_hpz_partition_size` has an effect at stage 3 only"),
    "quantised below 3": (zero(zero_quantized_gradients=True), "`zero_quantized_gradients` has an effect at stage 3"),
    "zero++ below 3": ({"stage": 2, "compression": "zero++"}, "needs `stage=3`"),
    "offload below 3": ({"stage": 2, "offload_parameters": True}, "`offload_parameters` needs `stage=3`"),
    "offload at 0": ({"stage": 0, "offload_optimizer": True}, "`offload_optimizer` needs `stage=1`"),
    "stage": ({"stage": 4}, "`stage=4` must be 0, 1, 2 or 3"),
    "two stages": ({"stage": 1, **zero(stage=3)}, "`stage=1` and the DeepSpeed config, which says 3"),
    "two buckets": ({"reduce_bucket_size": 5, **zero(reduce_bucket_size=6)}, "`reduce_bucket_size=5`.* says 6"),
    "no zero": ({"zero_optimization": False}, "set `stage=0`"),
    "misspelt": ({"config": {"gradient_cliping": 1.0}}, "did you mean `gradient_clipping`"),
    "unknown": ({"config": {"qqq": 1}}, "`qqq` is no key of a DeepSpeed config"),
    "removed": ({"config": {"elasticity": {}}}, "`elasticity`.*removed"),
    "mics": (zero(stage=3, mics_shard_size=2), "`zero_optimization.mics_shard_size`.*removed MiCS"),
    "one rank after the other": (
        {"compression": "int8", **zero(use_multi_rank_bucket_allreduce=False)},
        "needs `use_multi_rank_bucket_allreduce=True`",
    ),
    "scattered gradients": (
        {"compression": "int8", "contiguous_gradients": False},
        "needs `contiguous_gradients=True`",
    ),
    "twice compressed": (
        {"stage": 3, "compression": Int8(), **zero(zero_quantized_gradients=True)},
        "both compress gradients",
    ),
    "data type": ({"compression": "int8", "config": {"communication_data_type": "fp16"}}, "both say what travels"),
    "other parallelism": (
        {"compression": "int8", "config": {"sequence_parallel_size": 2}},
        "knows data parallel ranks",
    ),
    "topk": ({"compression": "topk"}, "cannot be used under DeepSpeed"),
    "auto": ({"compression": "auto"}, "`compression='auto'` is not a method under DeepSpeed"),
    "start step": ({"start_step": 3}, "`start_step=3` has no meaning for method `none`"),
    "negative start step": ({"compression": "int8", "start_step": -1}, "must be an int >= 0"),
    "residuals of a cast": ({"compression": "bf16", "residuals": True}, "drops nothing that could be kept"),
}


@needs_deepspeed
@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_built(case: str) -> None:
    options, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        CommOptDeepSpeedStrategy(**options)


AT_LAUNCH: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "accumulation": (
        {"config": {"gradient_accumulation_steps": 8}},
        {"accumulate_grad_batches": 4},
        "`gradient_accumulation_steps=8` in the DeepSpeed config, and `Trainer(accumulate_grad_batches=4)`",
    ),
    "clipping": (
        {"config": {"gradient_clipping": 1.0}},
        {"gradient_clip_val": 0.5},
        "`gradient_clipping=1.0` in the DeepSpeed config, and `Trainer(gradient_clip_val=0.5)`",
    ),
    "clipping alone": ({"config": {"gradient_clipping": 1.0}}, {}, "`Trainer(gradient_clip_val=0.0)`"),
    "clipping by value": (
        {},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "DeepSpeed clips by norm only",
    ),
    "precision": ({"config": {"bf16": {"enabled": True}}}, {}, "`bf16.enabled=True` in the DeepSpeed config"),
    "precision off": (
        {"config": {"bf16": {"enabled": False}}},
        {"precision": "bf16-mixed"},
        "`bf16.enabled=False` in the DeepSpeed config",
    ),
    "fp16": ({}, {"precision": "16-true"}, "DeepSpeed has no fp16 on the CPU"),
    "zero++": ({"stage": 3, "compression": "zero++"}, {}, "cannot run on the CPU: choose `compression='int8'`"),
    "compiled optimizer": ({"config": {"optimizer": {"type": "Adam", "params": {}}}}, {}, "compiles C++ for minutes"),
}


@needs_deepspeed
@pytest.mark.parametrize("case", AT_LAUNCH)
def test_refused_before_processes_are_started(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, trainer_options, says = AT_LAUNCH[case]
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(strategy=CommOptDeepSpeedStrategy(**options), **quiet, **trainer_options)
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=re.escape(says)):
        trainer.fit(BoringModel())


@needs_deepspeed
def test_the_same_value_twice_is_no_conflict() -> None:
    from lightning_commopt.zero.config import TrainerValues, take_trainer_values

    config: dict[str, Any] = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "train_batch_size": 64,
        "bf16": {"enabled": "auto"},
        "steps_per_print": 7,
    }
    take_trainer_values(config, TrainerValues(4, 0.5, "bf16-mixed", 8, 2))
    assert config == {"bf16": {"enabled": True}, "steps_per_print": 7}
    with pytest.raises(ValueError, match="`train_batch_size=65`.* make 64"):
        take_trainer_values({"train_batch_size": 65}, TrainerValues(4, 0.5, "bf16-mixed", 8, 2))


@needs_deepspeed
def test_configuration_is_laid_over_the_arguments() -> None:
    given = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "steps_per_print": 7}
    strategy = CommOptDeepSpeedStrategy(config=given, reduce_bucket_size=77, offload_optimizer=True)
    assert strategy.stage == 3
    assert strategy.config is not None
    assert strategy.config["steps_per_print"] == 7
    assert strategy.config["zero_force_ds_cpu_optimizer"] is False
    section = strategy.config["zero_optimization"]
    assert (section["reduce_bucket_size"], section["overlap_comm"]) == (77, False)
    assert section["offload_optimizer"]["device"] == "cpu"
    assert given == {"zero_optimization": {"stage": 3, "overlap_comm": False}, "steps_per_print": 7}


@needs_deepspeed
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_names(stage: int | None) -> None:
    name = "commopt_deepspeed" if stage is None else f"commopt_deepspeed_stage_{stage}"
    strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is CommOptDeepSpeedStrategy
    assert not isinstance(strategy, CommOptStrategy)
    assert strategy.stage == (stage or 2)


@needs_deepspeed
def test_residuals_by_default_where_they_are_needed() -> None:
    kept = {m: CommOptDeepSpeedStrategy(compression=m).residuals for m in ("none", "bf16", "int8", "int4", "onebit")}
    assert kept == {"none": False, "bf16": False, "int8": False, "int4": True, "onebit": True}
    assert CommOptDeepSpeedStrategy(compression="int8", residuals=True).residuals
    assert not CommOptDeepSpeedStrategy(compression=Int4(), residuals=False).residuals


def test_versions() -> None:
    int8, none = check_method("int8")[0], check_method("none")[0]
    check_version(int8, "0.19.8")
    check_version(none, "0.16.0")
    with pytest.raises(ValueError, match="tested with 0.19; 0.20.1 is installed"):
        check_version(int8, "0.20.1")


def test_deepspeed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-commopt\[deepspeed\]'"):
        CommOptDeepSpeedStrategy()


@needs_deepspeed
def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    flags = {"stage": 3, "compression": "Int4", "compression.block": 64, "offload_optimizer": "true"}
    strategy = "--trainer.strategy"
    args = [f"{strategy}=lightning_commopt.CommOptDeepSpeedStrategy", "--trainer.accelerator=cpu"]
    args += [f"{strategy}.{name}={value}" for name, value in flags.items()]
    cli = LightningCLI(BoringModel, args=args, run=False, seed_everything_default=False)
    ours = cli.trainer.strategy
    assert isinstance(ours, CommOptDeepSpeedStrategy)
    assert (ours.stage, ours.compression) == (3, Int4(block=64))
    assert ours.config is not None
    assert ours.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@needs_deepspeed
@pytest.mark.parametrize(("nodes", "hpz"), [(1, None), (2, 4)])
def test_zero_plus_plus_on_cuda_is_written_and_shown(nodes: int, hpz: int | None, monkeypatch: Any) -> None:
    """No GPU is touched: the environment is set up as far as the configuration goes."""
    strategy = CommOptDeepSpeedStrategy(3, "zero++")
    strategy.parallel_devices = [torch.device("cuda", i) for i in range(4)]
    strategy._num_nodes = nodes
    monkeypatch.setattr(CommOptDeepSpeedStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(CommOptDeepSpeedStrategy, "world_size", 4 * nodes)
    monkeypatch.setattr("lightning_commopt.failure.FailTogether.setup_environment", lambda self: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.setup_environment()
    assert any("on one node" in str(w.message) for w in caught) == (nodes == 1)
    shown = strategy.explain()
    assert "quantised weights and gradients (ZeRO++)" in shown
    zero = json.loads(shown.split("DeepSpeed config: ")[1])["zero_optimization"]
    assert (zero["stage"], zero["zero_quantized_weights"], zero["zero_quantized_gradients"]) == (3, True, True)
    assert zero.get("zero_hpz_partition_size") == hpz


@needs_deepspeed
def test_zero_plus_plus_keeps_what_the_configuration_says() -> None:
    zero: dict[str, Any] = {"zero_quantized_weights": False, "offload_param": {"device": "cpu"}}
    add_zero_plus_plus(zero, 8, 2)
    assert zero["zero_quantized_weights"] is False
    assert zero["zero_quantized_gradients"] is True
    assert "zero_hpz_partition_size" not in zero
