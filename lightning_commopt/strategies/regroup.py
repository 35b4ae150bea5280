"""Residuals under another number of ranks, another method, or another hierarchy."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_commopt.compression.pending import Parts
from lightning_commopt.routes import ControlGroup, GradientPath

__all__ = ["RESIDUALS", "RankState", "mean_over_ranks", "regrouped", "whole"]

RESIDUALS = ("first", "second", "scatter")
"""Kinds of state that are gradients not sent yet: to other nodes by senders and owners, and to a node's shards."""

RankState = dict[str, Parts]
"""One rank's state: residuals by their kind, the method's own by its name."""


def regrouped(
    states: Sequence[RankState], world: int, rank: int, *, old_shards: int = 1, new_shards: int = 1
) -> RankState:
    """Return a rank's state after a change of world size, method or hierarchy, such that the mean residual is kept.

    The first-hop residual of rank ``r`` is that of old rank ``r mod W`` when the world grew to a multiple, the mean of
    old ranks ``i`` with ``i mod W' = r`` when it shrank to a divisor, else (and with a hierarchy) the mean of all.
    Second-hop residuals belong to owners that no longer exist: each is added to every rank's first-hop residual. The
    method's own state is the same on all ranks and stays. Every rank gets the mean of all residuals ``"scatter"``.

    Args:
        states: The old ranks' states.
        world: The new world size.
        rank: The rank in it.
        old_shards: Ranks of a node that shared a bucket; each then held the residual of its shard only.
        new_shards: The same from now on.

    """
    old = len(states)
    if old_shards > 1 or new_shards > 1:
        sources = list(states)
    elif world % old == 0:
        sources = [states[rank % old]]
    elif old % world == 0:
        sources = [state for i, state in enumerate(states) if i % world == rank]
    else:
        sources = list(states)
    total: dict[str, Tensor] = {}
    for state in sources:
        _accumulate(total, state.get("first", {}), old_shards / len(sources))
    for state in states:
        _accumulate(total, state.get("second", {}), 1.0)
    scatter: dict[str, Tensor] = {}
    for state in states:
        _accumulate(scatter, state.get("scatter", {}), 1 / old)
    own = {kind: parts for kind, parts in states[0].items() if kind not in RESIDUALS}
    return {"first": whole(total), "second": {}} | ({"scatter": whole(scatter)} if scatter else {}) | own


def mean_over_ranks(state: RankState, path: GradientPath, control: ControlGroup) -> dict[str, dict[str, Tensor]]:
    """Return mean residuals over ranks by kind and parameter, those of owners added to senders'. A collective."""
    method, names = path.method, path.parameters.items()
    first = {n: torch.zeros(path.whole_numel(n)) for n, p in names if not method.travels_exactly(p.shape)}
    if method.error_feedback:
        _accumulate(first, state.get("first", {}), path.shards / control.world)
        _accumulate(first, state.get("second", {}), 1.0)
    scatter: dict[str, Tensor] = {}
    _accumulate(scatter, state.get("scatter", {}), 1 / control.world)
    for mean in (first, scatter):
        for name in sorted(mean):
            control.all_reduce(mean[name])
    return {"first": first, "scatter": scatter}


def whole(tensors: Mapping[str, Tensor]) -> Parts:
    """Return flat tensors that cover their parameters as parts."""
    return {name: [(0, tensor)] for name, tensor in tensors.items()}


def _accumulate(total: dict[str, Tensor], parts: Mapping[str, Sequence[tuple[int, Tensor]]], factor: float) -> None:
    """Add ``factor`` times the parts of each parameter to its flat total, grown where a part reaches further."""
    for name, pieces in parts.items():
        for first, values in pieces:
            needed, have = first + values.numel(), total.get(name, torch.zeros(0))
            if have.numel() < needed:
                have = torch.cat([have, torch.zeros(needed - have.numel())])
            have[first:needed].add_(values, alpha=factor)
            total[name] = have
