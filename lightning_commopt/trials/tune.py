"""One setting after the other: batch, accumulation, learning rate, method."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_commopt.trials.accumulation import Shares, shares_of
from lightning_commopt.trials.batch_size import LargestBatch, largest_batch
from lightning_commopt.trials.faults import ScriptError, TargetError
from lightning_commopt.trials.learning_rate import FoundRate, find_rate
from lightning_commopt.trials.method import ChosenMethod, MethodTrial, is_launched, strategy_for
from lightning_commopt.trials.one_process import batch_size_of
from lightning_commopt.trials.options import quiet
from lightning_commopt.trials.target import Target

__all__ = ["Step", "Tuned", "Wanted", "tune"]

_MOST_ON_CPU, _MOST_ON_GPU = 64, 8192

StepName = Literal["batch", "accumulation", "learning rate", "method"]


@dataclass(frozen=True)
class Wanted:
    """What is to be found, within which bounds.

    Args:
        target_batch: Samples of a step on all ranks; None for what the user's accumulation makes of the batch.
        most: Samples of the largest batch on one device; None: 64 on a CPU, 8192 on a GPU.
        batch_name: Attribute or hyperparameter that holds the batch size.
        lr_steps: Rates to try.
        method_steps: Optimizer steps under ``auto``.
        skip: Steps to leave out.

    """

    target_batch: int | None = None
    most: int | None = None
    batch_name: str = "batch_size"
    lr_steps: int = 100
    method_steps: int = 40
    skip: frozenset[StepName] = frozenset()


@dataclass(frozen=True)
class Step:
    """What was done for one setting, and why it came to what it did.

    Args:
        name: The setting.
        done: Whether something was found; otherwise the user's own setting stays.
        value: In words.
        why: One sentence.

    """

    name: StepName
    done: bool
    value: str
    why: str


@dataclass(frozen=True)
class Tuned:
    """Settings that suit a run.

    Args:
        options: What the user passes to ``Trainer``.
        ranks: Devices of the user's Trainer.
        nodes: Nodes.
        steps: What was done, and why.
        batch: The search for the largest batch; None where nothing was found.
        shares: How a step's samples are shared out; None where the batch is not known.
        rate: The learning rate; None where none was found.
        method: What ``auto`` took; None where nothing was decided.

    """

    options: Mapping[str, Any]
    ranks: int
    nodes: int
    steps: tuple[Step, ...]
    batch: LargestBatch | None
    shares: Shares | None
    rate: FoundRate | None
    method: ChosenMethod | None


def tune(target: Target, wanted: Wanted, tell: Callable[[str], None]) -> Tuned:
    """Try settings, with fresh objects of the user's function each time.

    Args:
        target: Makes Trainer and model.
        wanted: What is to be found.
        tell: Hears what is being done.

    Raises:
        TargetError: The function returns something else than it should.
        ScriptError: The user's code raised an exception.

    """
    tuning = _Tuning(target, wanted)
    steps = []
    for name, find in (
        ("batch", tuning.find_batch),
        ("accumulation", tuning.share_out),
        ("learning rate", tuning.find_rate),
        ("method", tuning.choose_method),
    ):
        steps.append(_step(name, wanted, find, tell))  # type: ignore[arg-type]  # the names are those of steps
    setup = tuning.setup
    return Tuned(
        setup.options,
        tuning.ranks,
        setup.trainer.num_nodes,
        tuple(steps),
        tuning.batch,
        tuning.shares,
        tuning.rate,
        tuning.method,
    )


def _step(name: StepName, wanted: Wanted, find: Callable[[], tuple[str, str]], tell: Callable[[str], None]) -> Step:
    if name in wanted.skip:
        return Step(name, False, "-", "left out, as asked")
    tell(f"{name} ...")
    try:
        step = Step(name, True, *find())
    except ScriptError:
        raise  # it would end the other steps too
    except TargetError as error:
        step = Step(name, False, "-", f"not found: {str(error).strip()}")
    tell(f"{name}: {step.value} ({step.why})")
    return step


class _Tuning:
    """What is known so far.

    Args:
        target: Makes Trainer and model.
        wanted: What is to be found.

    """

    def __init__(self, target: Target, wanted: Wanted) -> None:
        self.target = target
        self.wanted = wanted
        self.setup = target.make(lambda given: quiet(given, os.getcwd()))
        trainer = self.setup.trainer
        self.ranks = trainer.num_devices * trainer.num_nodes
        self.own = batch_size_of(self.setup, wanted.batch_name)
        self.batch: LargestBatch | None = None
        self.rate: FoundRate | None = None
        self.method: ChosenMethod | None = None
        self.shares = None if self.own is None else Shares(self.own, self.ranks, trainer.accumulate_grad_batches)

    def find_batch(self) -> tuple[str, str]:
        """Find the largest batch of one device."""
        on_cpu = self.setup.trainer.strategy.root_device.type == "cpu"
        most = self.wanted.most or (_MOST_ON_CPU if on_cpu else _MOST_ON_GPU)
        self.batch = found = largest_batch(self.target, self.wanted.batch_name, most, self.ranks)
        accumulated = self.setup.trainer.accumulate_grad_batches
        self.shares = Shares(found.size, self.ranks, accumulated)
        ended = {
            "memory": "twice as many did not fit into memory",
            "data": f"the data has {found.samples} samples for {self.ranks} ranks",
            "most": "the search ended there: `--max-batch` sets the limit",
        }[found.limit]
        if on_cpu:
            ended += "; memory on a CPU is no limit, so this says nothing about speed"
        elif found.limit == "memory":
            ended += f"; DDP's buckets take {found.gradient_bytes / 1e6:.0f} MB more, so watch the first steps"
        return f"{found.size} samples a device", f"doubled from 1 in one process, 3 steps each; {ended}"

    def share_out(self) -> tuple[str, str]:
        """Share the wanted batch out."""
        if self.shares is None:
            raise TargetError(
                f"nothing holds the batch size: name it with `--batch-name`, not `{self.wanted.batch_name}`"
            )
        if self.wanted.target_batch is None:
            why = "your own accumulation; `--target-batch` sets the samples of a step"
            return str(self.shares), why
        self.shares = shares_of(self.wanted.target_batch, self.shares.per_device, self.ranks)
        exact = self.shares.effective == self.wanted.target_batch
        return str(self.shares), "as few batches as fit" if exact else f"nearest to {self.wanted.target_batch}"

    def find_rate(self) -> tuple[str, str]:
        """Find the learning rate of one device's batch."""
        if self.shares is None:
            raise TargetError("the batch size is not known, so the rate could not be scaled")
        size = self.shares.per_device
        self.rate = rate = find_rate(
            self.target, self.wanted.batch_name, size, self.wanted.lr_steps, set_batch=size != self.own
        )
        peak, effective = rate.peak(self.shares.effective), self.shares.effective
        return f"{rate.suggested:.3g} at {size}, {peak:.3g} at {effective}", (
            f"where the loss fell most steeply, over {self.wanted.lr_steps} rising rates in one process; yours is "
            f"{rate.own:.3g}; {rate.rule} scaling for {rate.optimizer} (by the root for adaptive optimizers)"
        )

    def choose_method(self) -> tuple[str, str]:
        """Let ``auto`` choose a method under the user's ranks."""
        if self.ranks == 1:
            return "none", "your Trainer has one device: there is nobody to exchange gradients with"
        given = self.setup.options
        strategy_for(given.get("strategy", "auto"))
        if self.setup.trainer.num_nodes > 1 and not is_launched():
            raise TargetError(
                f"your Trainer has {self.setup.trainer.num_nodes} nodes: start this command on each by torchrun, with "
                "`--skip-batch --skip-lr`"
            )
        shares = self.shares
        changed = shares is not None and shares.per_device != self.own
        trial = MethodTrial(
            self.target.words,
            self.wanted.method_steps,
            shares.per_device if shares is not None and changed else None,
            self.wanted.batch_name,
            None if shares is None else shares.accumulated,
        )
        self.method = chosen = trial.run_on_ranks() if is_launched() else trial.run()
        if chosen is None:
            return "-", "known to rank 0"
        return chosen.method, f"{chosen.reason}; {chosen.steps} steps on {self.ranks} ranks under `strategy='commopt'`"
