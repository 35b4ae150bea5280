"""Validation and test loaders of different lengths: said, not changed."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_commopt.routes import ControlGroup

__all__ = ["EvaluationCounts"]


class EvaluationCounts:
    """Warns once when ranks evaluate different numbers of batches.

    Args:
        loop: Lightning's loop for validation or test.
        control: Agreement between ranks.

    """

    def __init__(self, loop: Any, control: ControlGroup) -> None:
        self._loop = loop
        self._control = control
        self._seen = loop._max_batches
        self._said = False

    def around(self, setup_data: Callable[[], None]) -> None:
        """Load the data, and compare the numbers of batches when they were loaded anew."""
        setup_data()
        mine = self._loop._max_batches
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
