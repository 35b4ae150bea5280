"""Loaders for validation, test and prediction that have different lengths: said, or not let be."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from lightning_commopt.routes import ControlGroup
from lightning_commopt.uneven.after_loading import empty_loaders_allowed
from lightning_commopt.uneven.counts import Told, Uneven
from lightning_commopt.uneven.fetcher import UnsizedFetcher

__all__ = ["EvaluationCounts", "LockstepEvaluation"]


class EvaluationCounts:
    """Warns once when ranks evaluate different numbers of batches.

    Args:
        loop: Lightning's loop for validation or test.
        control: Agreement between ranks.

    """

    def __init__(self, loop: Any, control: ControlGroup) -> None:
        self._loop = loop
        self._control = control
        self._seen = _limits(loop)
        self._said = False

    def around(self, setup_data: Callable[[], None]) -> None:
        """Load the data, and compare the numbers of batches when they were loaded anew."""
        setup_data()
        mine = _limits(self._loop)
        if mine is self._seen:
            return
        self._seen = mine
        everywhere = self._control.all_gather(list(mine))
        if not self._said and any(counts != everywhere[0] for counts in everywhere):
            self._said = True
            rank_zero_warn(
                f"Ranks have different numbers of {self._loop._stage.dataloader_prefix} batches, by rank: {everywhere} "
                "(one number a loader). Means over ranks weigh ranks alike, whatever their number, and a value logged "
                "with both `on_step=True` and `sync_dist=True` would wait for ever."
            )


class LockstepEvaluation:
    """Lets all ranks run as many forwards, each of which is a collective, or none.

    Args:
        loop: Lightning's loop for validation, test or prediction.
        control: Agreement between ranks.
        policy: ``"error"`` or ``"trim"``.
        stage: ``"validation"``, ``"test"`` or ``"predict"``.

    """

    def __init__(self, loop: Any, control: ControlGroup, policy: Uneven, stage: str) -> None:
        self._loop = loop
        self._control = control
        self._policy = policy
        self._seen = _limits(loop)
        self._unsized = False
        self._told = Told(stage, joins=False)

    def around_setup(self, setup_data: Callable[[], None]) -> None:
        """Load the data, and agree on the numbers of batches when they were loaded anew.

        Raises:
            ValueError: On every rank, where they differ and are not to be trimmed.

        """
        with empty_loaders_allowed(self._loop.trainer):
            setup_data()
        mine = _limits(self._loop)
        if mine is self._seen:
            return
        self._seen = mine
        unsized = any(sized_len(loader) is None for loader in self._loop._combined_loader.flattened)
        everywhere = self._control.all_gather((list(mine), unsized))
        self._unsized = any(unsized for _, unsized in everywhere)
        self._agree([counts for counts, _ in everywhere], mine)

    def around_reset(self, reset: Callable[[], None]) -> None:
        """Prepare an evaluation; where loaders have no length, ranks tell each other before each batch."""
        reset()
        loop = self._loop
        if not self._unsized:
            return
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            rank_zero_warn(
                f"The {self._told.stage} step draws its batches itself, from loaders without a length: nothing watches "
                "that all ranks have as many, without which they wait for each other."
            )
            return
        loop._data_fetcher = UnsizedFetcher(loop._data_fetcher, self._control, float("inf"), self._policy, self._told)

    def _agree(self, everywhere: Sequence[Sequence[float]], mine: list[float]) -> None:
        if all(counts == everywhere[0] for counts in everywhere):
            return
        empty = [rank for rank, counts in enumerate(everywhere) if not sum(counts)]
        if empty:
            raise ValueError(self._told.none(empty))
        if self._policy != "trim":
            raise ValueError(self._told.uneven(everywhere))
        mine[:] = [min(counts) for counts in zip(*everywhere, strict=True)]
        rank_zero_warn(
            f"{self._told.stage.capitalize()} batches by rank {list(everywhere)} (one number a loader): every rank "
            f"stops after {mine}, and what comes after is left out of the results."
        )


def _limits(loop: Any) -> list[float]:
    """Return how many batches of each loader there are; a new list whenever data was loaded."""
    limits: list[float] = loop.max_batches if isinstance(loop, _PredictionLoop) else loop._max_batches
    return limits
