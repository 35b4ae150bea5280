"""Short runs of a user's Trainer: `commopt tune` and `commopt doctor --compare`."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, StrategyRegistry

from lightning_commopt import (
    CommOptDeepSpeedStrategy,
    CommOptPipelineStrategy,
    CommOptShardedStrategy,
    CommOptStrategy,
)
from lightning_commopt.callbacks import LinearLRScaling
from lightning_commopt.cli import main
from lightning_commopt.trials import ScriptError, Target, TargetError
from lightning_commopt.trials.accumulation import Shares, shares_of
from lightning_commopt.trials.batch_size import largest_batch
from lightning_commopt.trials.faults import told
from lightning_commopt.trials.learning_rate import FoundRate, find_rate, steepest
from lightning_commopt.trials.method import ChosenMethod, MethodTrial, strategy_for
from lightning_commopt.trials.paste import trainer_code
from lightning_commopt.trials.tune import Tuned
from tests.pool import WorkerPool

pytest.importorskip("jsonargparse")

TOY = Path(__file__).with_name("trainer_toy.py")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The number of training batches:UserWarning", "ignore:Trainer already configured:UserWarning"
)


def target(name: str = "make_trainer") -> Target:
    """A function of the toy script."""
    return Target(f"{TOY}:{name}")


# ---- the contract -------------------------------------------------------------------------------------------------


def test_options_are_changed_for_the_trainer_of_the_function_alone() -> None:
    init = Trainer.__init__
    made = target().make(lambda given: {**given, "devices": 1, "strategy": "auto"})
    assert (made.trainer.num_devices, made.options["devices"]) == (1, 2)
    assert Trainer.__init__ is init
    with pytest.raises(TargetError, match="raised `ZeroDivisionError"):
        target().make(lambda given: {"devices": 1 // 0})
    assert Trainer.__init__ is init


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{TOY}:make_trainer_alone", r"returned \(Trainer\): it must return `\(trainer, model\)`"),
        (f"{TOY}:make_two", "made 2 Trainers"),
        (f"{TOY}:make_nothing", "has no function `make_nothing`"),
        (f"{TOY}:make_raising", r"make_raising` raised `ValueError: no data` at `\S*trainer_toy.py:\d+`\.$"),
        (f"{TOY}:make_leaving", r"make_leaving` called `sys.exit\('no data'\)` at `\S*trainer_toy.py:\d+`\.$"),
        (f"{TOY}:make_fitted", "make_fitted` starts a run: put `fit` and the like below `if __name__"),
        (f"{TOY}", "names no function: write `script.py:make_trainer`"),
        ("nowhere.py:make_trainer", "no script `nowhere.py`"),
        ("no_such_module:make_trainer", "no module `no_such_module`"),
    ],
)
def test_what_is_no_target_is_told(words: str, told: str) -> None:
    with pytest.raises(TargetError, match=told):
        Target(words).make()


def test_a_script_that_fits_when_it_is_imported_is_told(tmp_path: Path) -> None:
    script = tmp_path / "fits.py"
    script.write_text("import lightning as L\nL.Trainer(logger=False, enable_checkpointing=False).fit(None)\n")
    with pytest.raises(TargetError, match=r"fits.py` starts a run: put `fit`"):
        Target(f"{script}:make")
    assert Trainer.fit.__qualname__ == "Trainer.fit"


# ---- batch, accumulation, rate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most", "size", "limit"),
    [
        ("make_trainer", 6, 4, "most"),  # the largest power of 2
        ("make_small_memory", 32, 8, "memory"),
        ("make_with_loader", 512, 64, "data"),  # 128 samples for two ranks
    ],
)
def test_largest_batch(
    name: str, most: int, size: int, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = target(name)
    found = largest_batch(chosen, "batch_size", most, ranks=2)
    assert (found.size, found.limit) == (size, limit)
    assert found.gradient_bytes == 4 * (8 * 32 + 32 + 32 * 4 + 4)
    assert size in chosen.module.MADE[-1].sizes, "a size that was never tried"
    assert max(chosen.module.MADE[-1].sizes) <= most
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "largest", "ranks", "shares"),
    [
        (256, 32, 2, Shares(32, 2, 4)),
        (256, 48, 2, Shares(32, 2, 4)),  # not 3 x 42.7
        (8, 64, 2, Shares(4, 2, 1)),
        (250, 64, 4, Shares(62, 4, 1)),  # 250 is not to be had
        (1, 64, 4, Shares(1, 4, 1)),
    ],
)
def test_accumulation(wanted: int, largest: int, ranks: int, shares: Shares) -> None:
    assert shares_of(wanted, largest, ranks) == shares


def test_steepest_is_no_noise_at_small_rates() -> None:
    rates = [10 ** (-8 + 8 * i / 99) for i in range(100)]
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist()
    losses = [1 / (1 + (rate / 1e-2) ** 2) + 0.01 * n for rate, n in zip(rates, noise, strict=True)]
    found = steepest(rates, losses)
    assert found is not None
    assert 2e-3 < found < 5e-2
    assert steepest(rates, [1 + 0.001 * n for n in noise]) is None
    assert steepest(rates, [math.nan] * 100) is None


def test_rate_at_a_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = target("make_with_loader")
    found = find_rate(chosen, "batch_size", 16, 40, set_batch=True)
    assert set(chosen.module.MADE[-1].sizes) == {16}
    assert (found.own, found.optimizer, found.rule, found.batch_size) == (0.05, "SGD", "linear", 16)
    assert 1e-3 < found.suggested < 1
    assert found.peak(64) == 4 * found.suggested
    assert FoundRate(0.1, 0.1, "AdamW", 16).peak(64) == 0.2
    assert not list(tmp_path.iterdir())


# ---- method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("auto", "commopt"),
        ("ddp", "commopt"),
        ("ddp_spawn", "commopt_spawn"),
        ("ddp_find_unused_parameters_true", "commopt_find_unused_parameters_true"),
        ("commopt_int8", "commopt"),
        (DDPStrategy(find_unused_parameters=True), "commopt_find_unused_parameters_true"),
        (CommOptStrategy("int4", start_method="fork"), "commopt_fork"),
    ],
)
def test_auto_has_the_launcher_of_the_users_strategy(given: object, taken: str) -> None:
    assert strategy_for(given) == taken


@pytest.mark.parametrize("given", ["fsdp", "commopt_hsdp_int8", FSDPStrategy()])
def test_a_strategy_that_is_not_data_parallel_is_told(given: object) -> None:
    with pytest.raises(TargetError):
        strategy_for(given)


def test_method_in_processes_of_its_own() -> None:
    chosen = MethodTrial(f"{TOY}:make_trainer", steps=20, batch_size=8, timeout_s=100).run()
    assert chosen.steps == 20
    assert chosen.method in ("none", "bf16", "int8", "int4")
    assert "of a dense step on" in chosen.reason


# ---- the commands -------------------------------------------------------------------------------------------------


def on_a_rank(*words: str) -> int:
    """The command, as torchrun starts it on each rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "toy"
    return main(words)


def test_tune_under_torchrun(pool: WorkerPool) -> None:
    words = ("tune", f"{TOY}:make_trainer", "--target-batch", "32", "--skip-batch", "--skip-lr", "--method-steps", "20")
    assert pool.run(on_a_rank, 2, *words, "--json", group=False) == [0, 0]
    text = pool.output[0]
    found = json.loads(text[text.index("\n{\n") :])
    assert [(step["name"], step["done"]) for step in found["steps"]] == [
        ("batch", False),
        ("accumulation", True),
        ("learning rate", False),
        ("method", True),
    ]
    assert found["shares"] == {"per_device": 4, "ranks": 2, "accumulated": 4, "effective": 32}
    assert found["method"]["steps"] == 20


def test_tune_without_torchrun_finds_batch_and_rate(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--max-batch", "8", "--target-batch", "32", "--lr-steps", "40", "--skip-method", "--json"]
    assert main(["tune", f"{TOY}:make_with_loader", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["batch"]["size"] == 8
    assert found["shares"]["accumulated"] == 2
    assert found["learning_rate"]["batch_size"] == 8
    assert "memory on a CPU is no limit" in found["steps"][0]["why"]
    assert f"# lr = {found['learning_rate']['suggested']:.3g}" in found["code"]


def test_code_makes_the_trainer() -> None:
    tuned = Tuned(
        {"strategy": "ddp", "max_epochs": 3, "accelerator": "cpu", "logger": False, "callbacks": [Timer()]},
        ranks=2,
        nodes=1,
        steps=(),
        batch=None,
        shares=Shares(8, 2, 4),
        rate=FoundRate(0.3, 0.1, "AdamW", 8),
        method=ChosenMethod("int8", "", 20, 1.0, 2.0),
    )
    names: dict[str, Trainer] = {}
    code = trainer_code(tuned)
    exec(code, names)
    assert "# as you have it, besides: callback Timer" in code
    trainer = names["trainer"]
    assert isinstance(trainer.strategy, CommOptStrategy)
    assert trainer.strategy.compression.name == "int8"
    assert (trainer.num_devices, trainer.accumulate_grad_batches, trainer.max_epochs) == (2, 4, 3)
    assert trainer.logger is None
    (scaling,) = (callback for callback in trainer.callbacks if isinstance(callback, LinearLRScaling))
    assert (scaling.options.base_batch_size, scaling.options.rule) == (8, "sqrt")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", f"{TOY}:make_two"], "made 2 Trainers"),
        (["tune", f"{TOY}:make_trainer", "--lr-steps", "3"], "`--lr-steps 3` must be at least 15"),
        (["doctor", "--compare", f"{TOY}:make_nothing"], "has no function"),
        (["doctor", "--compare", f"{TOY}:make_trainer", "--steps", "0"], "`--steps` must be at least 1"),
        (["doctor", "--compare", f"{TOY}:make_trainer", "--selftest"], "ask for one"),
    ],
)
def test_wrong_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def tuned_with(strategy: object, method: ChosenMethod | None = None) -> Tuned:
    return Tuned({"strategy": strategy, "accelerator": "cpu"}, 2, 1, (), None, None, None, method)


@pytest.mark.parametrize(
    ("given", "pasted"),
    [
        ("fsdp", "fsdp"),
        ("commopt_hsdp_int8", "commopt_hsdp_int8"),
        ("commopt_deepspeed_stage_3", "commopt_deepspeed_stage_3"),
        (CommOptShardedStrategy(), "commopt_hsdp_bf16"),
        (CommOptShardedStrategy("int8", wrap=1000), "commopt_hsdp_int8"),
        (CommOptPipelineStrategy(stages=2, start_method="spawn"), "commopt_pipeline_spawn"),
        (CommOptStrategy("int4", start_method="fork"), "commopt_int4_fork"),
        (CommOptStrategy(find_unused_parameters=True), "commopt_find_unused_parameters_true"),
        (DDPStrategy(), "ddp"),
        (FSDPStrategy(), "fsdp"),
    ],
)
def test_the_users_own_strategy_stays(given: object, pasted: str) -> None:
    code = trainer_code(tuned_with(given))
    assert f'strategy="{pasted}",' in code
    assert ("besides: the further options of" in code) == (not isinstance(given, str))
    assert pasted in StrategyRegistry
    if not isinstance(given, str):
        assert StrategyRegistry[pasted]["strategy"] is type(given)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_zero_stays(stage: int) -> None:
    pytest.importorskip("deepspeed")
    code = trainer_code(tuned_with(CommOptDeepSpeedStrategy(stage, "int8")))
    assert f'strategy="commopt_deepspeed_stage_{stage}",' in code


def test_a_strategy_without_a_name_is_left_to_the_user() -> None:
    class Own(FSDPStrategy):
        """Not known to anybody."""

    code = trainer_code(tuned_with(Own()))
    assert "strategy=" not in code
    assert "# as you have it, besides: `strategy`, which has no name: Own" in code


@pytest.mark.parametrize(
    ("given", "pasted"),
    [
        ("ddp", "commopt_int8"),
        ("ddp_find_unused_parameters_true", "commopt_int8_find_unused_parameters_true"),
        (DDPStrategy(start_method="spawn"), "commopt_int8_spawn"),
    ],
)
def test_a_chosen_method_has_the_users_launcher(given: object, pasted: str) -> None:
    code = trainer_code(tuned_with(given, ChosenMethod("int8", "", 20, 1.0, 2.0)))
    assert f'strategy="{pasted}",' in code
    assert pasted in StrategyRegistry


_KEY_ERROR = """training raised `KeyError: 'labels'` at `{script}:{line}`."""
_EXIT = "training called `sys.exit(3)` at `{script}:{line}`."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "make_failing"], _KEY_ERROR),
        (["tune", "make_failing", "--skip-batch", "--json"], _KEY_ERROR),
        (["tune", "make_failing", "--skip-batch", "--skip-lr"], _KEY_ERROR),  # in processes of its own
        (["tune", "make_exiting"], _EXIT),
        (["doctor", "--compare", "make_failing_alone"], _KEY_ERROR),
        (["doctor", "--compare", "make_exiting"], _EXIT),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_what_a_training_step_raises_is_one_sentence(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place, script = next(i for i, word in enumerate(words) if word.startswith("make_")), os.path.relpath(TOY)
    fault = 'KeyError("labels")' if said == _KEY_ERROR else "sys.exit(3)"
    line = next(i for i, text in enumerate(TOY.read_text().splitlines(), 1) if fault in text)
    assert main([*words[:place], f"{TOY}:{words[place]}", *words[place + 1 :]]) == 2
    out, error = capfd.readouterr()
    assert not out
    assert error.splitlines()[-1] == f"commopt {words[0]}: {said.format(script=script, line=line)}"
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_an_interrupted_trial_is_interrupted() -> None:
    def fit() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    with pytest.raises(KeyboardInterrupt), told("training"):
        fit()


def test_what_a_worker_of_a_data_loader_raises_is_one_line() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File\nno"
    said = r"`ValueError: Caught ValueError in DataLoader worker process 0\. no` at "
    with pytest.raises(ScriptError, match=said), told("training"):
        raise ValueError(text)


def test_what_lightning_refuses_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "bare.py"
    script.write_text(
        "import lightning as L\n\ndef make():\n"
        "    return L.Trainer(accelerator='cpu', max_epochs=1), L.LightningModule()\n"
    )
    assert main(["doctor", "--compare", f"{script}:make"]) == 2
    assert "No `training_step()` method defined" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("make_trainer", 0), ("make_by_rank", 1)])
def test_compare_with_one_process(pool: WorkerPool, name: str, code: int) -> None:
    codes = pool.run(on_a_rank, 2, "doctor", "--compare", f"{TOY}:{name}", "--steps", "3", group=False)
    assert codes == [code, 0]
    output = pool.output[0]
    assert output.count("DistributedDoctor, whole fit of 3 steps on 2 ranks") == 1
    expected = "the loss parts from that of one process at step 1" if code else "3 steps in one process give the same"
    assert expected in " ".join(output.split())
