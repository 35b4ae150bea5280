"""What to do about gradients that are not finite, when no gradient scaler handles them."""

from typing import Literal, NoReturn

from lightning_commopt.routes import ControlGroup, GradientPath

__all__ = ["Nonfinite", "raise_named", "raise_together"]

Nonfinite = Literal["propagate", "error", "skip"]
"""Let them through as DDP does, end all ranks with a name, or skip the optimizer step on all ranks."""


def raise_together(path: GradientPath, control: ControlGroup) -> None:
    """End all ranks alike when the last round had a gradient that was not finite.

    Raises:
        FloatingPointError: On every rank, naming the first such parameter and the ranks on which it was not finite.

    """
    if path.nonfinite_parameters():
        raise_named(path, control)


def raise_named(path: GradientPath, control: ControlGroup) -> NoReturn:
    """End all ranks, some of which had a gradient that was not finite, maybe of a shard that others do not have.

    Raises:
        FloatingPointError: On every rank, naming the first such parameter and the ranks on which it was not finite.

    """
    path.clear_nonfinite()
    everyone = control.all_gather((path.nonfinite_parameters(), path.nonfinite_parameters(here=True)))
    name = next(anywhere[0] for anywhere, _ in everyone if anywhere)
    ranks = [rank for rank, (_, here) in enumerate(everyone) if name in here]
    raise FloatingPointError(
        f"The gradient of `{name}` is not finite on rank(s) {ranks} in round {path.rounds}. Lower the learning rate "
        "or clip gradients, or choose `nonfinite='skip'` to skip such steps, 'propagate' to let them through."
    )
