"""The order of forwards and backwards on each rank."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from lightning_commopt.pipeline.actions import Action, Kind, Schedule

__all__ = ["gpipe", "interleaved", "one_f_one_b", "zero_bubble_v"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965).

    Args:
        stages: Number of stages, one a rank.
        microbatches: Number of microbatches in a step.

    """
    _check(stages=stages, microbatches=microbatches)
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
    _check(stages=stages, microbatches=microbatches)
    actions = (_one_f_one_b(stage, min(microbatches, stages - stage), microbatches) for stage in range(stages))
    return Schedule(tuple(range(stages)), tuple(actions))


def interleaved(ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """1F1B with several stages on each rank, dealt out in turn (https://arxiv.org/abs/2104.04473, section 2.2).

    The bubble is ``stages_per_rank`` times smaller than in 1F1B, for as many times more messages. Microbatches pass a
    rank's stages in rounds of ``ranks`` or a few more, so that any number of microbatches will do.

    Args:
        ranks: Number of ranks.
        stages_per_rank: Number of stages on each rank.
        microbatches: Number of microbatches in a step; below ``ranks``, ranks wait longer.

    """
    _check(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches)
    actions = (_interleaved(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks))
    return Schedule(tuple(range(ranks)) * stages_per_rank, tuple(actions))


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two stages on each rank, placed in a V, and a backward in two parts (https://arxiv.org/abs/2401.10241).

    Gradients of weights are computed while a rank would wait. A rank holds the activations of at most ``2 * ranks``
    microbatches on one of its stages, as much as the first rank does in 1F1B. Where a forward, a backward for inputs
    and a backward for weights take equal time and there are at least ``2 * ranks - 1`` microbatches, a rank waits for
    its first microbatch only.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches in a step.

    """
    _check(ranks=ranks, microbatches=microbatches)
    actions = (_numbered(_zero_bubble_v(rank, ranks, microbatches), microbatches) for rank in range(ranks))
    return Schedule((*range(ranks), *reversed(range(ranks))), tuple(actions))


def _one_f_one_b(stage: int, ahead: int, microbatches: int) -> tuple[Action, ...]:
    """Return the order of a stage that computes ``ahead`` forwards before its first backward."""
    actions = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action(Kind.BACKWARD, stage, m))
        if ahead + m < microbatches:
            actions.append(Action(Kind.FORWARD, stage, ahead + m))
    return tuple(actions)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Action, ...]:
    rounds = _rounds(ranks, microbatches)
    stages = [chunk * ranks + rank for chunk in range(stages_per_rank)]
    forwards = [Action(Kind.FORWARD, s, m) for members in rounds for s in stages for m in members]
    backwards = [Action(Kind.BACKWARD, s, m) for members in rounds for s in reversed(stages) for m in members]
    ahead = min(len(forwards), (stages_per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank))
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Split the microbatches evenly into rounds of at least ``ranks``, the longer ones first."""
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> list[tuple[Kind, int]]:
    """Return the kind and stage of each action, for ``2 * ranks - 1`` microbatches or more."""
    forward, inputs, weights = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    down, up = rank, 2 * ranks - 1 - rank  # towards the turn of the V, and back
    through_up = [(forward, up), (inputs, up), (weights, up)]
    through_both = [(inputs, down), (weights, down), *through_up]
    full_rounds = max(microbatches, 2 * ranks - 1) - (2 * ranks - 1 - rank)
    return [
        *[(forward, down)] * (2 * (ranks - rank) - 1),
        *[(forward, up), (forward, down)] * rank,
        *through_up * (ranks - rank),
        *[(forward, down), *through_both] * full_rounds,
        *through_both * (ranks - 1 - rank),
        *[(inputs, down), (inputs, up)] * rank,
        *[(inputs, down), (weights, down)] * (ranks - rank),
        *[(weights, up)] * rank,
        *[(weights, down)] * rank,
    ]


def _numbered(order: Iterable[tuple[Kind, int]], microbatches: int) -> tuple[Action, ...]:
    """Number the microbatches of each kind and stage; those beyond ``microbatches`` are left out."""
    seen: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for kind, stage in order:
        if seen[kind, stage] < microbatches:
            actions.append(Action(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return tuple(actions)


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
