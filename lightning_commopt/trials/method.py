"""The method that ``auto`` takes in a short run under the user's own ranks.

The run has processes of its own, so that Lightning's launcher finds a program which does nothing else, and so that
nothing of it is left: ``python -m lightning_commopt.trials.method ORDER``.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commopt.failure.errors import is_echo
from lightning_commopt.strategies import CommOptStrategy
from lightning_commopt.trials.faults import ScriptError, TargetError
from lightning_commopt.trials.one_process import with_batch_size
from lightning_commopt.trials.options import quiet
from lightning_commopt.trials.target import Setup, Target

__all__ = ["ChosenMethod", "MethodTrial", "is_launched", "strategy_for"]

_LAUNCHES = ("_spawn", "_fork", "_notebook")


@dataclass(frozen=True)
class ChosenMethod:
    """What ``auto`` came to.

    Args:
        method: Its word.
        reason: Its own words, with what was measured.
        steps: Optimizer steps of the run.
        step_ms: Of a step under the method, predicted; 0 where nothing was predicted.
        dense_ms: The same under DDP's own reducer.

    """

    method: str
    reason: str
    steps: int
    step_ms: float
    dense_ms: float


class _Deciding(Callback):
    """Writes what was decided into a file, in whichever process rank 0 is.

    Args:
        path: Of the file.

    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = trainer.strategy
        auto = strategy._auto if isinstance(strategy, CommOptStrategy) else None
        if not trainer.is_global_zero or auto is None:
            return
        last = auto.decisions()[-1] if auto.decisions() else None
        reason = auto.blocked or (
            auto.tuner.words() if auto.tuner is not None else "one rank: there is nobody to talk to"
        )
        chosen = ChosenMethod(
            last.choice.method if last is not None else "none",
            reason,
            trainer.global_step,
            last.predicted_ms if last is not None else 0.0,
            last.dense_ms if last is not None else 0.0,
        )
        self.path.write_text(json.dumps(asdict(chosen) | {"decided": last is not None}))


@dataclass(frozen=True)
class MethodTrial:
    """A short run under ``auto``.

    Args:
        words: The user's function.
        steps: Optimizer steps.
        batch_size: Of one device; None for the user's.
        batch_name: Attribute or hyperparameter that holds it.
        accumulated: Batches of a step; None for the user's.
        timeout_s: Until it is given up.

    """

    words: str
    steps: int
    batch_size: int | None = None
    batch_name: str = "batch_size"
    accumulated: int | None = None
    timeout_s: float = 1800.0

    def run(self) -> ChosenMethod:
        """Run it in processes of its own.

        Raises:
            TargetError: It failed, or came to no decision.
            ScriptError: The user's code raised an exception on a rank.

        """
        with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
            path = Path(folder) / "chosen.json"
            order = json.dumps({"trial": asdict(self), "path": str(path)})
            command = [sys.executable, "-m", __spec__.name, order]
            try:
                ran = subprocess.run(command, stdout=2, timeout=self.timeout_s, check=False, env=_environment())
            except subprocess.TimeoutExpired:
                raise TargetError(f"the run did not end within {self.timeout_s:.0f} s") from None
            if ran.returncode and (fault := _fault(Path(folder))):
                raise fault
            if ran.returncode:
                raise TargetError(f"the run failed with exit code {ran.returncode}: see above")
            return _read(path)

    def run_on_ranks(self) -> ChosenMethod | None:
        """Run it on the ranks that a launcher started; the answer is on rank 0."""
        with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
            path = Path(folder) / "chosen.json"
            return _read(path) if self._fit(path) else None

    def _fit(self, path: Path) -> bool:
        """Train, and return whether this process has rank 0."""

        def changed(given: dict[str, Any]) -> dict[str, Any]:
            options = quiet(given, str(path.parent), [_Deciding(path)])
            options |= {"strategy": strategy_for(given.get("strategy", "auto")), "max_epochs": -1}
            options |= {"max_steps": self.steps}
            return options if self.accumulated is None else options | {"accumulate_grad_batches": self.accumulated}

        setup: Setup = Target(self.words).make(changed)
        if self.batch_size is not None:
            setup = with_batch_size(setup, self.batch_name, self.batch_size)
        setup.fit()
        return setup.trainer.is_global_zero


def is_launched() -> bool:
    """Whether a launcher such as torchrun made this process one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def strategy_for(given: object) -> str:
    """Return the name of ``auto`` with the launcher that the user's strategy has.

    Raises:
        TargetError: The user's strategy is not plain data parallel.

    """
    if isinstance(given, str):
        if given.startswith(("commopt_pipeline", "commopt_hsdp", "commopt_deepspeed")):
            raise TargetError(f"`strategy={given!r}` has its own choice of methods: see its documentation")
        if given == "auto" or given.startswith(("ddp", "commopt")):
            launch = next((launch for launch in _LAUNCHES if launch in given), "")
            unused = next((end for end in ("true", "false") if given.endswith(f"find_unused_parameters_{end}")), "")
            return f"commopt{launch}" + (f"_find_unused_parameters_{unused}" if unused else "")
    elif type(given) is DDPStrategy or isinstance(given, CommOptStrategy):
        launch = {"popen": "", "spawn": "_spawn", "fork": "_fork"}.get(given._start_method, "")
        unused = "_find_unused_parameters_true" if given._ddp_kwargs.get("find_unused_parameters") else ""
        return f"commopt{launch}{unused}"
    name = given if isinstance(given, str) else type(given).__name__
    raise TargetError(f"`{name}` is not plain data parallel, and `auto` chooses for that alone")


def _read(path: Path) -> ChosenMethod:
    if not path.exists():
        raise TargetError("the run ended before its first step")
    told = json.loads(path.read_text())
    if not told.pop("decided"):
        raise TargetError(
            f"nothing was decided in {told['steps']} steps ({told['reason']}): take more `--method-steps`"
        )
    return ChosenMethod(**told)


def _fault(folder: Path) -> TargetError | None:
    """Read what ranks wrote before they ended; what only follows from another rank's fault comes last."""
    faults = [json.loads(file.read_text()) for file in folder.glob("fault-*.json")]
    for fault in sorted(faults, key=lambda fault: fault["is_echo"]):
        return (ScriptError if fault["by_script"] else TargetError)(fault["says"])
    return None


def _trial(order: dict[str, Any]) -> int:
    """Train in this process; what is wrong with the user's code goes into a file beside the answer."""
    path = Path(order["path"])
    try:
        MethodTrial(**order["trial"])._fit(path)
    except TargetError as error:
        echo = error.__cause__ is not None and is_echo(error.__cause__)
        fault = {"says": str(error), "by_script": isinstance(error, ScriptError), "is_echo": echo}
        path.with_name(f"fault-{os.getpid()}.json").write_text(json.dumps(fault))
        return 2
    return 0


def _environment() -> dict[str, str]:
    """Return this process's environment, in which a script beside the caller is found as it was."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")])])}


if __name__ == "__main__":
    sys.exit(_trial(json.loads(sys.argv[1])))
