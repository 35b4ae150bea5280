"""``commopt tune``."""

import os
import sys
import textwrap
from dataclasses import asdict

from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, Table

__all__ = ["tune"]


def tune(
    target: str,
    target_batch: int | None = None,
    max_batch: int | None = None,
    batch_name: str = "batch_size",
    lr_steps: int = 100,
    method_steps: int = 40,
    skip_batch: bool = False,
    skip_accumulation: bool = False,
    skip_lr: bool = False,
    skip_method: bool = False,
) -> Answer | None:
    """Which batch, accumulation, learning rate and method suit my run?

    Tries them in short runs of your own Trainer and prints the code to paste. `make_trainer()` in your script returns
    (trainer, model) or (trainer, model, data), and calls no fit; it is called anew for each trial, so that nothing of
    yours is changed:

        commopt tune train.py:make_trainer --target-batch 256

    Over several nodes, batch and rate are found on one, and the method on all:

        torchrun --nnodes 2 ... -m lightning_commopt.cli tune train.py:make_trainer --skip-batch --skip-lr

    Args:
        target: Function that makes your Trainer and model, as script.py:function.
        target_batch: Samples of an optimizer step on all devices; by default what your own accumulation makes of the
            batch that is found.
        max_batch: Samples of the largest batch to try on one device; 64 on a CPU, 8192 on a GPU by default.
        batch_name: Attribute or hyperparameter of your model or data module that holds the batch size.
        lr_steps: Learning rates to try, one an optimizer step; at least 15.
        method_steps: Optimizer steps under strategy="commopt" until its choice is taken; at least 20.
        skip_batch: Keep your batch size.
        skip_accumulation: Keep your accumulation.
        skip_lr: Keep your learning rate.
        skip_method: Keep your strategy.

    """
    from lightning_commopt.trials import Target, TargetError
    from lightning_commopt.trials.method import is_launched
    from lightning_commopt.trials.paste import trainer_code
    from lightning_commopt.trials.tune import StepName, Wanted
    from lightning_commopt.trials.tune import tune as find

    for option, value, least in (
        ("--target-batch", target_batch, 1),
        ("--max-batch", max_batch, 1),
        ("--lr-steps", lr_steps, 15),
        ("--method-steps", method_steps, 20),
    ):
        if value is not None and value < least:
            raise UsageError(f"`{option} {value}` must be at least {least}.")
    if is_launched() and not (skip_batch and skip_lr):
        raise UsageError(
            "Batch and learning rate are found in one process: under torchrun, add `--skip-batch --skip-lr`."
        )
    skipped: dict[StepName, bool] = {
        "batch": skip_batch,
        "accumulation": skip_accumulation,
        "learning rate": skip_lr,
        "method": skip_method,
    }
    skip = frozenset(name for name, left_out in skipped.items() if left_out)
    wanted = Wanted(target_batch, max_batch, batch_name, lr_steps, method_steps, skip)
    try:
        tuned = find(Target(target), wanted, lambda text: print(f"commopt tune: {text}", file=sys.stderr, flush=True))
    except TargetError as error:
        raise UsageError(str(error)) from None
    if int(os.environ.get("RANK", "0")):
        return None
    code = trainer_code(tuned)
    table = Table(f"commopt tune {target}", ["setting", "found"], [[step.name, step.value] for step in tuned.steps])
    reasons = [textwrap.fill(f"{step.name}: {step.why}.", 100, subsequent_indent="  ") for step in tuned.steps]
    failed = any(not step.done and step.name not in skip for step in tuned.steps)
    data = {
        "steps": tuned.steps,
        "ranks": tuned.ranks,
        "batch": tuned.batch,
        "shares": None if tuned.shares is None else {**asdict(tuned.shares), "effective": tuned.shares.effective},
        "learning_rate": None if tuned.rate is None else {**asdict(tuned.rate), "rule": tuned.rate.rule},
        "method": tuned.method,
        "code": code,
    }
    return Answer(data, [table, *reasons, "", code], code=int(failed))
