"""The order of forwards and backwards on each rank."""

from lightning_commopt.pipeline.actions import Action, Kind, Schedule

__all__ = ["gpipe", "one_f_one_b"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965).

    Args:
        stages: Number of stages, one a rank.
        microbatches: Number of microbatches in a step.

    """
    _check(stages, microbatches)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    actions = (tuple(Action(kind, s, m) for kind in kinds for m in range(microbatches)) for s in range(stages))
    return Schedule(tuple(range(stages)), tuple(actions))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward (https://arxiv.org/abs/1806.03377, with a flush as in https://arxiv.org/abs/2006.09503).

    Stage s keeps the activations of at most ``min(microbatches, stages - s)`` microbatches.

    Args:
        stages: Number of stages, one a rank.
        microbatches: Number of microbatches in a step.

    """
    _check(stages, microbatches)
    actions = (_one_f_one_b(stage, min(microbatches, stages - stage), microbatches) for stage in range(stages))
    return Schedule(tuple(range(stages)), tuple(actions))


def _one_f_one_b(stage: int, ahead: int, microbatches: int) -> tuple[Action, ...]:
    """Return the order of a stage that computes ``ahead`` forwards before its first backward."""
    actions = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action(Kind.BACKWARD, stage, m))
        if ahead + m < microbatches:
            actions.append(Action(Kind.FORWARD, stage, ahead + m))
    return tuple(actions)


def _check(stages: int, microbatches: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
