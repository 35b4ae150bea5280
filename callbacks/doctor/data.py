"""Check 1: which samples each rank sees."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.content import sample_hashes
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.loaders import LoaderFacts, facts_of
from lightning_commopt.callbacks.monitor.batch_size import samples_in

__all__ = ["DataCheck"]

_HASHED = 8  # batches
_MUCH = 0.01  # of a data set: repeats below do no harm
_OVERLAP = 0.1  # of the samples compared: chance duplicates stay below
_UNEVEN = 1.1


class DataCheck(Check):
    """Batches and samples a rank, repeats of the sampler, the same data on two ranks, samplers without sharding."""

    name = "data"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._facts: list[LoaderFacts] = []
        self._epochs: list[float] = []  # batches of one, by rank
        self._samples: int | None = 0
        self._batches = 0
        self._hashes: list[list[int]] = []
        self._hashing = True

    @override
    def train_start(self) -> None:
        self._facts = facts_of(self.run.trainer.train_dataloader)
        self._epochs = self.run.all_gather(float(self.run.trainer.num_training_batches))
        for finding in self._uneven_epochs():  # under DDP the fit may wait for ever before it comes to the table
            rank_zero_warn(f"`DistributedDoctor`: {finding.message}. What to do: {finding.remedy}.")

    @override
    def batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        count = samples_in(batch)
        self._samples = None if self._samples is None or count is None else self._samples + count
        if self._hashing and len(self._hashes) < _HASHED and self.run.world > 1:
            hashes = sample_hashes(batch)
            self._hashing = hashes is not None
            self._hashes += [] if hashes is None else [hashes]

    @override
    def interrupted(self) -> None:
        self._hashing = False  # after an epoch a sample may well come to another rank in the next epoch

    @override
    def findings(self) -> list[Finding]:
        world = self.run.world
        ranks = self.run.all_gather((self._facts, self._batches, self._samples, self._hashes))
        facts, batches, samples, hashes = (list(column) for column in zip(*ranks, strict=True))
        seen = f"{_numbers(self._epochs)} batches an epoch, {_numbers(samples)} samples in {_numbers(batches)} batches"
        if world == 1:
            return [self.fine(seen), self.unchecked("one process: its data cannot be compared with other ranks'.")]
        found = [*self._uneven_epochs(), *self._uneven(samples), *self._padding(facts[0]), *self._unsharded(facts)]
        found += self._same(hashes, sum(f.padded for f in facts[0])) if any(hashes) else []
        answers = found or [self.fine(f"by rank: {seen}; no rank sees another's data")]
        if not any(hashes):
            answers.append(self.unchecked("batches hold no tensors, so their content was not compared"))
        return answers

    def _uneven_epochs(self) -> Iterator[Finding]:
        epochs = self._epochs
        if len(set(epochs)) > 1:
            shortest = epochs.index(min(epochs))
            yield self.found(
                f"rank {shortest} has {min(epochs):g} batches an epoch, another has {max(epochs):g}",
                "give every rank as many batches, or use `CommOptStrategy(uneven='trim')` or `'join'`",
                rank=shortest,
                number=max(epochs) - min(epochs),
            )

    def _uneven(self, samples: Sequence[int | None]) -> Iterator[Finding]:
        known = [count for count in samples if count]
        if len(known) == len(samples) and max(known) > _UNEVEN * min(known):
            most = known.index(max(known))
            yield self.found(
                f"rank {most} saw {max(known)} samples while another saw {min(known)}: gradients are means over ranks, "
                "so samples of a small batch count more",
                "give every rank the same batch size, or weight the loss by batch size x ranks / all samples",
                rank=most,
                number=max(known) / min(known),
            )

    def _padding(self, facts: Sequence[LoaderFacts]) -> Iterator[Finding]:
        for loader in facts:
            if loader.samples and loader.padded >= max(1.0, _MUCH * loader.samples):
                yield self.found(
                    f"`{loader.sampler}` repeats {loader.padded} of {loader.samples} samples in every epoch "
                    f"({loader.padded / loader.samples:.0%}), so that all ranks have as many",
                    "pass `DistributedSampler(..., drop_last=True)` with `use_distributed_sampler=False`, or use a "
                    "data set whose length the number of ranks divides",
                    number=loader.padded,
                )

    def _unsharded(self, everyone: Sequence[Sequence[LoaderFacts]]) -> Iterator[Finding]:
        world = self.run.world
        for loaders in zip(*everyone, strict=False):
            first = loaders[0]
            drawn = [loader.drawn or 0 for loader in loaders]
            own = len({(loader.digest, loader.samples) for loader in loaders}) > 1
            if own or not first.samples or first.shards or sum(drawn) < first.samples + world:
                continue
            yield self.found(
                f"`{first.sampler}` does not share samples out: {world} ranks draw {sum(drawn)} samples an epoch from "
                f"{first.samples}, each of them {sum(drawn) / first.samples:.1f} times",
                "remove `use_distributed_sampler=False`, or make the sampler draw every "
                f"{world}th sample from `trainer.global_rank` on, as `DistributedSampler` does",
                number=sum(drawn) / first.samples,
            )

    def _same(self, everyone: Sequence[Sequence[Sequence[int]]], padded: int) -> Iterator[Finding]:
        """Compare content; one answer a rank, for the first rank with the same."""
        for rank, mine in enumerate(everyone):
            for other in range(rank):
                theirs = everyone[other]
                equal = [i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] == pair[1]]
                own = [h for batch in mine for h in batch]
                shared = len(set(own) & {h for batch in theirs for h in batch})
                if not equal and shared <= max(padded, _OVERLAP * len(own)):
                    continue
                what = (
                    f"batch {equal[0]} is the same (and {len(equal)} of the first {len(mine)})"
                    if equal
                    else (f"{shared} of the first {len(own)} samples are the same")
                )
                yield self.found(
                    f"rank {rank} sees the data of rank {other}: {what}",
                    "shard the data by `trainer.global_rank`: a `DistributedSampler`, or other files for each rank in "
                    "an iterable data set; a constant data set needs no sharding",
                    rank=rank,
                    number=float(len(equal) or shared),
                )
                break


def _numbers(values: Sequence[float | None]) -> str:
    """One number where all are equal."""
    texts = ["?" if value is None else f"{value:g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)
