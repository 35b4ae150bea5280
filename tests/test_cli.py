"""LightningCLI: every option by YAML and by flag, there and back, and what a mistake is told."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_commopt import (
    BF16,
    FP16,
    AutoPolicy,
    CommOptStrategy,
    Compression,
    Int4,
    Int8,
    OneBit,
    PowerSGD,
    TopK,
    Uncompressed,
)
from lightning_commopt.compression import METHODS

pytest.importorskip("jsonargparse")
from lightning.pytorch.cli import LightningCLI  # needs jsonargparse

EXAMPLES = Path(__file__).parents[1] / "examples"
CLASS = "--trainer.strategy=lightning_commopt.CommOptStrategy"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI calls what jsonargparse deprecates."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def build(*args: str) -> CommOptStrategy:
    """The strategy of a Trainer that LightningCLI builds."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    cli = LightningCLI(BoringModel, args=[*quiet, *args], run=False, seed_everything_default=False)
    assert type(cli.trainer.strategy) is CommOptStrategy
    return cli.trainer.strategy


def flags(**options: object) -> list[str]:
    """Flags for a strategy by class; `__` in a name stands for a dot."""
    return [CLASS, *(f"--trainer.strategy.{name.replace('__', '.')}={value}" for name, value in options.items())]


def state(strategy: CommOptStrategy) -> dict[str, Any]:
    """What the options of a strategy came to."""
    plain = (bool, int, float, str, dict, timedelta, Compression, type(None))
    attributes = {name: value for name, value in vars(strategy).items() if isinstance(value, plain)}
    return attributes | {
        "true_mean": strategy._short_window.true_mean,
        "uneven": strategy._uneven.policy,
        "residuals": strategy._checkpoint.policy,
    }


OPTIONS: dict[str, tuple[object, str, object]] = {
    "compression": ("Int4", "compression", Int4()),
    "hierarchy": (2, "hierarchy", 2),
    "start_step": (7, "start_step", 7),
    "nonfinite": ("skip", "nonfinite", "skip"),
    "residuals": ("mean", "residuals", "mean"),
    "true_mean": ("true", "true_mean", True),
    "uneven": ("join", "uneven", "join"),
    "stall_timeout": (90, "stall_timeout", 90),
    "nccl": ("{algo: ring, NCCL_IB_DISABLE: 1}", "nccl", {"NCCL_ALGO": "ring", "NCCL_IB_DISABLE": "1"}),
    "find_unused_parameters": ("true", "_ddp_kwargs", {"find_unused_parameters": True}),
    "bucket_cap_mb": (5, "_ddp_kwargs", {"bucket_cap_mb": 5}),
    "gradient_as_bucket_view": ("true", "_ddp_kwargs", {"gradient_as_bucket_view": True}),
    "broadcast_buffers": ("false", "_ddp_kwargs", {"broadcast_buffers": False}),
    "process_group_backend": ("gloo", "_process_group_backend", "gloo"),
    "timeout": ("0:10:00", "_timeout", timedelta(minutes=10)),
    "start_method": ("spawn", "_start_method", "spawn"),
}
"""Each option: its flag, and the attribute that it comes to."""


def test_every_option_is_tested() -> None:
    own = set(inspect.signature(CommOptStrategy).parameters) - {"kwargs"}
    assert own <= set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_option_by_flag(option: str) -> None:
    value, attribute, expected = OPTIONS[option]
    options = {"compression": "int8", option: value}
    assert state(build(*flags(**options)))[attribute] == expected


def test_every_option_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = flags(**{option: value for option, (value, _, _) in OPTIONS.items()})
    built = build(*arguments)
    assert built.compression == Int4()
    with pytest.raises(SystemExit):
        build(*arguments, "--print_config")
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    assert state(build(f"--config={config}")) == state(built)


def test_an_option_left_out_is_as_in_python() -> None:
    assert state(build(*flags(compression="int8"))) == state(build("--trainer.strategy=commopt_int8"))
    python = CommOptStrategy("int8", process_group_backend="gloo")
    assert build(*flags(compression="int8"))._ddp_kwargs == python._ddp_kwargs == {}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_method_by_word_and_by_class(method: type[Compression]) -> None:
    for word in (method.name, method.__name__, f"lightning_commopt.{method.__name__}"):
        built = build(*flags(compression=word)).compression
        assert type(built) is method
        assert built == method()


def test_policy_with_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(*flags(compression="auto"))._policy == AutoPolicy()
    options = {"compression": "AutoPolicy", "compression__allow": "[onebit]", "compression__error_budget": 0.1}
    expected = AutoPolicy(allow=["onebit"], error_budget=0.1)
    assert build(*flags(**options))._policy == expected
    with pytest.raises(SystemExit):
        build(*flags(**options), "--print_config")
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    assert build(f"--config={config}")._policy == expected


def test_method_with_options() -> None:
    assert build(*flags(compression="Int4", compression__block=128)).compression == Int4(block=128)
    assert build(*flags(compression="TopK", compression__density=0.1)).compression == TopK(density=0.1)
    assert build(*flags(compression="PowerSGD", compression__exact_below=0)).compression == PowerSGD(exact_below=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "Int5", "compression__block": 8}, "Int5"),
        ({"compression": "Int4", "compression__rank": 8}, "'lightning_commopt.Int4'.*'rank' is not"),
        ({"compression": "Int4", "compression__block": "many"}, "\"block\".*<class 'int'>.*many"),
        ({"compresion": "int8"}, "'compresion' is not"),
        ({"timeout": 600}, "h:m:s"),
        ({"nonfinite": "ignore"}, "'propagate', 'error', 'skip'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_flag_is_named(options: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(*flags(**options))
    assert re.search(told, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "int5"}, "`compression='int5'` is not a method. Choose one of 'auto', 'none', 'bf16'"),
        ({"compression": "Int4", "compression__block": 100}, r"`Int4\(block=100\)`: `block` must be a power of two"),
        ({"compression": "none", "start_step": 5}, "`start_step=5` has no meaning for method `none`"),
        ({"compression": "int8", "nccl": "{alg: Ring}"}, "does not know the variable `ALG`. Did you mean `ALGO`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_value_is_explained(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(*flags(**options))


# ---- examples/cli.py ------------------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, object]] = {
    "none": {"compression": Uncompressed(), "nonfinite": "propagate"},
    "bf16": {"compression": BF16()},
    "fp16": {"compression": FP16(block=256)},
    "int8": {"compression": Int8(block=256, stochastic=False), "start_step": 0, "hierarchy": "auto"},
    "int4": {"compression": Int4(block=128)},
    "onebit": {"compression": OneBit(block=256), "start_step": 50, "nonfinite": "error"},
    "topk": {"compression": TopK(density=0.02), "start_step": 50},
    "powersgd": {"compression": PowerSGD(rank=4), "start_step": 20, "_ddp_kwargs": {"bucket_cap_mb": 10}},
    "hierarchical": {"compression": Int8(), "hierarchy": 2},
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `examples/cli.py`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location("example_cli", EXAMPLES / "cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_config_is_tested() -> None:
    assert {path.stem for path in (EXAMPLES / "configs").iterdir()} == set(PRESETS)
    assert set(METHODS) <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_config_builds_its_strategy(preset: str, example: ModuleType, tmp_path: Path) -> None:
    arguments = [f"--config={EXAMPLES}/configs/{preset}.yaml", f"--trainer.default_root_dir={tmp_path}"]
    cli = example.main([*arguments, "--trainer.logger=false"], run=False)
    strategy = cli.trainer.strategy
    assert type(strategy) is CommOptStrategy
    assert type(strategy.compression) is type(PRESETS[preset]["compression"])
    assert {name: state(strategy)[name] for name in PRESETS[preset]} == PRESETS[preset]
    assert cli.trainer.num_devices == (4 if preset == "hierarchical" else 2)


def test_config_trains_on_two_processes(tmp_path: Path) -> None:
    arguments = ["--trainer.max_steps=3", "--trainer.limit_val_batches=0", "--data.batch_size=1"]
    command = [sys.executable, str(EXAMPLES / "cli.py"), "fit", f"--config={EXAMPLES}/configs/int8.yaml", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "--trainer.strategy.compression.block=128"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert "method `Int8(exact_below=1024, block=128, stochastic=False, seed=0)` is in force on 2 ranks" in output
    saved = tmp_path / "lightning_logs" / "version_0" / "config.yaml"
    assert "lightning_commopt.Int8" in saved.read_text()
