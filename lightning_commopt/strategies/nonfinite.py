"""What to do about gradients that are not finite, when no gradient scaler handles them."""

from typing import Literal

from lightning_commopt.routes import ControlGroup, GradientPath

__all__ = ["Nonfinite", "raise_together"]

Nonfinite = Literal["propagate", "error", "skip"]
"""Let them through as DDP does, end all ranks with a name, or skip the optimizer step on all ranks."""


def raise_together(path: GradientPath, control: ControlGroup) -> None:
    """End all ranks alike when the last round had a gradient that was not finite.

    Raises:
        FloatingPointError: On every rank, naming the first such parameter and the ranks on which it was not finite.

    """
    bad = path.nonfinite_parameters()
    if not bad:
        return
    path.clear_nonfinite()
    everywhere = control.all_gather(path.nonfinite_parameters(here=True))
    ranks = [rank for rank, names in enumerate(everywhere) if bad[0] in names]
    raise FloatingPointError(
        f"The gradient of `{bad[0]}` is not finite on rank(s) {ranks} in round {path.rounds}. Lower the learning rate "
        "or clip gradients, or choose `nonfinite='skip'` to skip such steps, 'propagate' to let them through."
    )
