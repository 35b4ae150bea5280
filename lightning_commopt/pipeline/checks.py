"""What is refused before anything is sent."""

import re
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_commopt.pipeline.errors import PipelineError

__all__ = ["check_module", "check_optimizers", "once"]


def check_module(module: "pl.LightningModule", *, fitting: bool) -> None:
    """Refuse models that a pipeline cannot run.

    Raises:
        PipelineError: Saying what to do instead.

    """
    if fitting and not module.automatic_optimization:
        raise PipelineError(
            "`automatic_optimization = False`: a pipeline runs forwards and backwards of all stages inside of "
            "`training_step`. Let Lightning optimise, or train with `strategy='commopt'`."
        )
    for name, part in module.named_modules():
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise PipelineError(
                f"`{name or type(part).__name__}` is compiled, and a compiled step cannot be cut into stages: leave "
                "`torch.compile` out."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise PipelineError(f"`{name}` has sparse gradients, which a pipeline does not carry: set `sparse=False`.")


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that run the step more than once, and more than one of them.

    Raises:
        PipelineError: Saying what to do instead.

    """
    if len(optimizers) > 1:
        raise PipelineError(
            f"`configure_optimizers` returned {len(optimizers)} optimizers: a pipeline takes one, with parameter "
            "groups for different options."
        )
    for optimizer in optimizers:
        name = type(optimizer).__name__
        perturbs = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
        if isinstance(optimizer, LBFGS) or perturbs or re.search(r"SAM$|LBFGS", name):
            raise PipelineError(
                f"`{name}` evaluates the loss several times in a step, which a pipeline does not: take an optimizer "
                "that needs it once."
            )


def once(closure: Any) -> Any:
    """Return a closure that an optimizer may call once.

    Raises:
        PipelineError: At the second call.

    """
    called = False

    def guarded() -> Any:
        nonlocal called
        if called:
            raise PipelineError(
                "The optimizer evaluated the loss a second time in one step, which a pipeline does not: take an "
                "optimizer that needs it once."
            )
        called = True
        return closure()

    return guarded
