"""Fetchers that end an epoch on all ranks at the same batch.

They take the place of Lightning's own in the fit loop, which asks a fetcher's ``done`` for the last batch of an epoch:
validation, the accumulation window, schedulers and checkpoints all follow.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loops.fetchers import _DataFetcher
from typing_extensions import override

from lightning_commopt.routes import ControlGroup
from lightning_commopt.uneven.counts import Told, Uneven

__all__ = ["AgreedFetcher", "SizedFetcher", "UnsizedFetcher"]

_Fetched = tuple[Any, int, int]  # batch, its number, number of the loader


class AgreedFetcher(_DataFetcher):
    """Yields this rank's batches, and then its last one again and again, until the epoch ends on all ranks.

    Args:
        source: Lightning's fetcher, whose iterator and fetched batches are taken over.
        world: Number of ranks.

    Attributes:
        live: Ranks whose batch at hand is not a repeated one.
        repeats: Whether this rank's is.

    """

    def __init__(self, source: _DataFetcher, world: int) -> None:
        super().__init__()
        self.setup(source.combined_loader)
        self.iterator = source.iterator
        self._start_profiler, self._stop_profiler = source._start_profiler, source._stop_profiler
        self.live = self.world = world
        self.repeats = False
        self._ahead: list[_Fetched] = list(getattr(source, "batches", ()))
        self._last: _Fetched | None = None

    @override
    def reset(self) -> None:
        self.fetched, self.done = 0, False
        self.live, self.repeats = self.world, False
        self._ahead, self._last = [], None

    @override
    def __next__(self) -> _Fetched:
        if self.done:
            raise StopIteration
        item = self._advance()
        self.fetched += 1
        return item

    @abstractmethod
    def _advance(self) -> _Fetched:
        """Return the next batch, and set ``done``, ``live`` and ``repeats``."""

    def _fetch(self) -> _Fetched | None:
        """Return this rank's next batch, None when there is none."""
        if self._ahead:
            return self._ahead.pop(0)
        assert self.iterator is not None
        self._start_profiler()
        try:
            fetched: _Fetched = next(self.iterator)
        except StopIteration:
            return None
        finally:
            self._stop_profiler()
        return fetched

    def _repeated(self) -> _Fetched:
        """Return the last batch again; after a resume, when it is gone, any other."""
        for _ in range(2):  # the first iteration of a stateful loader may begin where the resumed one had ended
            if self._last is None:
                self.iterator = iter(self.combined_loader)
                self._last = self._fetch()
        if self._last is None:
            raise RuntimeError("This rank has ended, and its loader gives no batch to repeat: choose `uneven='trim'`.")
        return self._last


class SizedFetcher(AgreedFetcher):
    """Ends after a number of batches that was agreed on; costs nothing a batch.

    Args:
        source: Lightning's fetcher.
        batches: Batches of an epoch, by rank.
        rank: This rank.
        end: Batches after which the epoch ends on all ranks.

    """

    def __init__(self, source: _DataFetcher, batches: Sequence[int], rank: int, end: int) -> None:
        super().__init__(source, len(batches))
        self._batches = batches
        self._own = batches[rank]
        self._end = end

    @override
    def _advance(self) -> _Fetched:
        self.live = sum(self.fetched < batches for batches in self._batches)
        self.repeats = self.fetched >= self._own
        self.done = self.fetched + 1 >= self._end
        if self.repeats:
            return self._repeated()
        item = self._fetch()
        if item is None:
            raise RuntimeError(
                f"The training loader promised {self._own} batches and gave {self.fetched}: correct its `__len__`."
            )
        if self.fetched + 1 == self._own < self._end:
            self._last = item
        return item


class UnsizedFetcher(AgreedFetcher):
    """Looks one batch ahead, and tells the other ranks before each batch: one small all-reduce of 8 bytes.

    Args:
        source: Lightning's fetcher.
        control: Agreement between ranks.
        limit: Batches after which this rank ends even if its loader has more.
        policy: What to do when a rank ends before the others.
        told: What is said about it.

    """

    def __init__(self, source: _DataFetcher, control: ControlGroup, limit: float, policy: Uneven, told: Told) -> None:
        super().__init__(source, control.world)
        self._told = told
        self._control = control
        self._limit = limit
        self._policy = policy
        self._said = False
        self._ended = False

    @override
    def reset(self) -> None:
        super().reset()
        self._ended = False

    @override
    def _advance(self) -> _Fetched:
        item = None if self._ended else self._fetch()
        following = self._fetch() if item is not None and self.fetched + 1 < self._limit else None
        self._ahead = [] if following is None else [following]
        self._ended = following is None
        self.live, going_on = self._exchange(item is not None, following is not None)
        self.repeats = item is None
        if self.live == 0 or (self.live < self.world and self.fetched > 0 and self._policy == "trim"):
            self.done = True
            raise StopIteration  # only where an epoch begins: at its start, or at the resume of an ended one
        if self.live < self.world:
            self._check_missing(item is not None)
        elif 0 < going_on < self.world:
            self._some_end(following is not None)
        self.done = going_on == 0 or (going_on < self.world and self._policy == "trim")
        if item is None:
            return self._repeated()
        if following is None:
            self._last = item
        return item

    def _exchange(self, has: bool, has_more: bool) -> tuple[int, int]:
        """Return how many ranks have a batch now, and how many have one after it."""
        both = torch.tensor(has * (self.world + 1) + has_more)
        self._control.all_reduce(both)
        return divmod(int(both.item()), self.world + 1)

    def _check_missing(self, has: bool) -> None:
        """Refuse ranks that have no batch, unless they ended before and may repeat one."""
        if self.fetched > 0 and self._policy == "join":
            return
        missing = self._without(has)
        raise ValueError(self._told.ended(missing, self.fetched) if self.fetched else self._told.none(missing))

    def _some_end(self, has_more: bool) -> None:
        """Refuse that some ranks end with this batch and others do not, or say it once."""
        if self._said:
            return
        ended = self._without(has_more)
        batches = self.fetched + 1
        if self._policy == "error":
            raise ValueError(self._told.ended(ended, batches))
        self._said = True
        what = "every rank stops there" if self._policy == "trim" else "they repeat their last one with weight 0"
        which = f"{self._told.stage} batches of rank(s) {ended}"
        rank_zero_info(f"commopt: the {which} end after {batches} while others go on: {what}.")

    def _without(self, has: bool) -> list[int]:
        """Return the ranks that do not have it."""
        return [rank for rank, has in zip(self._control.members, self._control.all_gather(has), strict=True) if not has]
