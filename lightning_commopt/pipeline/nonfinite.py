"""Gradients that are not finite on some stage."""

from lightning_commopt.routes import ControlGroup, GradientPath

__all__ = ["nonfinite_everywhere", "raise_together"]


def nonfinite_everywhere(path: GradientPath, stages: ControlGroup) -> list[str]:
    """Return the names of parameters whose gradient was not finite in the last round, on any stage. A collective."""
    return [name for names in stages.all_gather(path.nonfinite_parameters()) for name in names]


def raise_together(path: GradientPath, stages: ControlGroup, world: ControlGroup) -> None:
    """End all ranks alike when the last round had a gradient that was not finite on any stage. A collective.

    Raises:
        FloatingPointError: On every rank, naming the first such parameter and the ranks on which it was not finite.

    """
    if not (bad := nonfinite_everywhere(path, stages)):
        return
    path.clear_nonfinite()
    here = world.all_gather(path.nonfinite_parameters(here=True))
    ranks = [rank for rank, names in enumerate(here) if bad[0] in names]
    raise FloatingPointError(
        f"The gradient of `{bad[0]}` is not finite on rank(s) {ranks} in round {path.rounds}. Lower the learning "
        "rate or clip gradients, or choose `nonfinite='skip'` to skip such steps, 'propagate' to let them through."
    )
