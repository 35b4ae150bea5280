"""An optimizer step of which the gradient path is told."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_commopt.routes import GradientPath
from lightning_commopt.strategies.applied_steps import AppliedSteps

__all__ = ["told_step"]


def told_step(
    step: Callable[..., Any],
    optimizer: Optimizer,
    closure: Callable[[], Any],
    path: GradientPath,
    names: frozenset[str] | None,
    *,
    scaled: AppliedSteps | None,
    why_skip: Callable[[], str] | None,
) -> Any:
    """Step an optimizer, unless a gradient is not finite, and tell the path whether it was applied.

    Args:
        step: Lightning's: ``step(optimizer, closure)``.
        optimizer: What steps.
        closure: Runs forward and backward.
        path: Where gradients went.
        names: The optimizer's parameters; None for all.
        scaled: Knows which steps a gradient scaler applied; None where there is none.
        why_skip: Returns the warning with which a step is skipped after its backward, the same on all ranks, or
            ``""``; None where no step is skipped.

    """
    if why_skip is not None:
        loss = closure()
        if why := why_skip():
            rank_zero_warn(why)
            path.step_done(False, names)
            return loss
        closure = lambda: loss  # noqa: E731 - it has run
    output = step(optimizer, closure)
    path.step_done(True if scaled is None else scaled.applied(optimizer), names)
    return output
