"""Check 2: what must be equal at the start, and what must not."""

import hashlib
import os
from collections import defaultdict
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.random_streams import digests, read_streams
from lightning_commopt.callbacks.monitor.replicas import first_differing

__all__ = ["SeedCheck"]


class SeedCheck(Check):
    """Initial parameters and buffers are equal over ranks, before they are made so; random streams are not."""

    name = "seeds"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._initial: Finding | None = None
        self._before: dict[str, str] = {}
        self._drawn: set[str] = set()
        self._last: dict[str, str] = {}
        self._worker_seeds = ""

    @override
    def before_wrapping(self) -> None:
        gather, named = self.run.all_gather, self.run.view.initial()
        if not all(gather(named is not None)):
            self._initial = self.unchecked("the module was made in parts: no rank has seen another's parameters.")
            return
        assert named is not None
        shapes = hashlib.blake2b(repr([(n, tuple(t.shape), t.dtype) for n, t in named.items()]).encode()).hexdigest()
        models = gather(shapes)
        if len(set(models)) > 1:
            rank = next(rank for rank, shape in enumerate(models) if shape != models[0])
            self._initial = self.found(
                f"the module of rank {rank} has other parameters or buffers than that of rank 0",
                "build the same module on every rank",
                rank=rank,
            )
            return
        differing = first_differing(named, gather)
        if differing is None:
            self._initial = self.fine("initial parameters and buffers are equal on all ranks")
            return
        name, ranks = differing
        self._initial = self.found(
            f"`{name}` began differently on rank {ranks[0]} than on rank 0; {self.run.view.beginning}",
            "call `lightning.seed_everything(seed)` before the module is made: whatever else was computed from it "
            "still differs",
            rank=ranks[0],
            number=len(ranks),
        )

    @override
    def train_start(self) -> None:
        loaders = CombinedLoader(self.run.trainer.train_dataloader).flattened
        workers = any(getattr(loader, "num_workers", 0) > 0 for loader in loaders)
        if workers and not int(os.environ.get("PL_SEED_WORKERS", "0")):  # they are seeded from this stream
            self._worker_seeds = digests(self._streams())["torch"]

    @override
    def batch_start(self, batch: Any, batch_idx: int) -> None:
        now = digests(self._streams())
        self._before = self._before or now
        self._note_drawn(now)  # loading a batch in this process draws, too

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        self._note_drawn(digests(self._streams()))

    @override
    def interrupted(self) -> None:
        self._last = {}  # new iterators over loaders draw seeds for their workers, which is no use of randomness

    def _note_drawn(self, now: dict[str, str]) -> None:
        """Note the streams that have moved on since the last call."""
        self._drawn |= {name for name in self._last if self._last[name] != now[name]}
        self._last = now

    @override
    def findings(self) -> list[Finding]:
        if self.run.world == 1:
            return [self.unchecked("one process: there are no other ranks whose seeds could agree.")]
        initial = self._initial or self.unchecked("the module was not seen before its strategy took it.")
        ranks = self.run.all_gather((self._before, self._drawn, self._worker_seeds))
        found = [*self._same_streams([(before, drawn) for before, drawn, _ in ranks])]
        twice = _twice([seeds for *_, seeds in ranks])
        if twice is not None:
            found.append(
                self.found(
                    f"the workers of the data loaders of rank {twice[1]} have the seeds of those of rank {twice[0]}: "
                    "augmentation draws the same numbers there",
                    "call `lightning.seed_everything(seed, workers=True)`, which gives every rank's workers their own",
                    rank=twice[1],
                )
            )
        return [initial, *(found or [self.fine("random streams that are drawn from differ between ranks")])]

    def _same_streams(self, ranks: list[tuple[dict[str, str], set[str]]]) -> list[Finding]:
        by_pair: dict[tuple[int, int], list[str]] = defaultdict(list)
        for stream in ranks[0][0]:
            twice = _twice([before.get(stream, "") for before, _ in ranks])
            if twice is not None and any(stream in drawn for _, drawn in ranks):
                by_pair[twice].append(stream)
        return [
            self.found(
                f"rank {rank} draws the same random numbers as rank {other} (`{'`, `'.join(streams)}`): dropout, noise "
                "and augmentation are not independent",
                "after the module is made, seed each rank differently, for example in `on_train_start`: "
                "`torch.manual_seed(seed + self.global_rank)`, and the same for `numpy.random` and `random`",
                rank=rank,
                number=len(streams),
            )
            for (other, rank), streams in by_pair.items()
        ]

    def _streams(self) -> dict[str, Any]:
        return read_streams(self.run.trainer.strategy.root_device)


def _twice(values: list[str]) -> tuple[int, int] | None:
    """Return the first two ranks with the same value; empty ones do not count."""
    for rank, value in enumerate(values):
        if value and value in values[:rank]:
            return values.index(value), rank
    return None
