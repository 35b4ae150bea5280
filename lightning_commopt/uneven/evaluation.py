"""Loaders for validation, test and prediction that have different lengths: said, or not let be."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from lightning_commopt.routes import ControlGroup
from lightning_commopt.uneven.after_loading import empty_loaders_allowed
from lightning_commopt.uneven.counts import Told, Uneven
from lightning_commopt.uneven.fetcher import UnsizedFetcher

__all__ = ["EvaluationCounts"]


class EvaluationCounts:
    """Sees to it that ranks which run each forward together evaluate as many batches; between others, warns once.

    Args:
        loop: Lightning's loop.
        stage: ``"validation"``, ``"test"`` or ``"predict"``.
        control: Agreement between all ranks.
        forward: Those with which this one runs each forward together; None: it runs them alone.
        policy: ``"error"`` or ``"trim"``, of ranks in ``forward``.

    """

    def __init__(self, loop: Any, stage: str, control: ControlGroup, forward: ControlGroup | None, policy: Uneven):
        self._loop = loop
        self._control = control
        self._forward = forward
        self._policy = policy
        self._seen = _limits(loop)
        self._said = self._unsized = False
        self._told = Told(stage, joins=False)

    def around_setup(self, setup_data: Callable[[], None]) -> None:
        """Load the data, and compare the numbers of batches when they were loaded anew.

        Raises:
            ValueError: On every rank, where some have to be equal, are not, and are not to be trimmed.

        """
        with nullcontext() if self._forward is None else empty_loaders_allowed(self._loop.trainer):
            setup_data()
        mine = _limits(self._loop)
        if mine is self._seen:
            return
        self._seen = mine
        together = (self._control.rank,) if self._forward is None else self._forward.members
        unsized = any(sized_len(loader) is None for loader in self._loop._combined_loader.flattened)
        everywhere = self._control.all_gather((list(mine), together, unsized))
        self._unsized = any(everywhere[rank][2] for rank in together)
        batches = [counts for counts, _, _ in everywhere]
        self._agree(batches, sorted({members for _, members, _ in everywhere}), mine)
        if self._told.stage != "predict":
            self._warn(batches)

    def around_reset(self, reset: Callable[[], None]) -> None:
        """Prepare an evaluation; where loaders have no length, ranks tell each other before each batch."""
        reset()
        loop = self._loop
        if self._forward is None or not self._unsized:
            return
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            rank_zero_warn(
                f"The {self._told.stage} step draws its batches itself, from loaders without a length: nothing watches "
                "that all ranks have as many, without which they wait for each other."
            )
            return
        source = loop._data_fetcher
        loop._data_fetcher = UnsizedFetcher(source, self._forward, float("inf"), self._policy, self._told)

    def _agree(self, batches: list[list[float]], groups: Sequence[tuple[int, ...]], mine: list[float]) -> None:
        """Compare the numbers of each group, and trim them."""
        empty = [rank for rank, counts in enumerate(batches) if not sum(counts)]
        if self._forward is not None and 0 < len(empty) < len(batches):
            raise ValueError(self._told.none(empty))
        uneven = [members for members in groups if any(batches[rank] != batches[members[0]] for rank in members)]
        if not uneven:
            return
        if self._policy != "trim":
            raise ValueError(self._told.uneven(batches))
        before = list(batches)
        for members in uneven:
            shortest = [min(counts) for counts in zip(*(batches[rank] for rank in members), strict=True)]
            batches[:] = [shortest if rank in members else counts for rank, counts in enumerate(batches)]
        mine[:] = batches[self._control.rank]
        rank_zero_warn(
            f"Ranks have different numbers of {self._told.stage} batches, by rank: {before}. They stop after "
            f"{batches}, and what would come after is left out of the results."
        )

    def _warn(self, batches: Sequence[Sequence[float]]) -> None:
        """Say that ranks which evaluate on their own have different numbers of batches."""
        if not self._said and any(counts != batches[0] for counts in batches):
            self._said = True
            rank_zero_warn(
                f"Ranks have different numbers of {self._told.stage} batches, by rank: {batches} (one number a "
                "loader). Means over ranks weigh ranks alike, whatever their number, and a value logged with both "
                "`on_step=True` and `sync_dist=True` would wait for ever."
            )


def _limits(loop: Any) -> list[float]:
    """Return how many batches of each loader there are; a new list whenever data was loaded."""
    limits: list[float] = loop.max_batches if isinstance(loop, _PredictionLoop) else loop._max_batches
    return limits
