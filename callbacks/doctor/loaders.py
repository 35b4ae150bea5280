"""What training loaders tell of the way in which they spread samples over ranks."""

from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_commopt.callbacks.doctor.content import data_digest

__all__ = ["LoaderFacts", "facts_of"]


@dataclass(frozen=True)
class LoaderFacts:
    """One training loader on one rank.

    Args:
        sampler: Class of its sampler; empty where it has none.
        shards: Whether the sampler knows of ranks.
        drawn: Samples that this rank draws in an epoch; None where unknown.
        samples: Samples of the data set; None where unknown.
        padded: Samples that a distributed sampler repeats so that all ranks have as many.
        digest: Of the data set; see :func:`data_digest`.

    """

    sampler: str
    shards: bool
    drawn: int | None
    samples: int | None
    padded: int
    digest: str


def facts_of(loaders: Any) -> list[LoaderFacts]:
    """Return the facts of all loaders that training draws from."""
    return [_facts(loader) for loader in CombinedLoader(loaders).flattened]


def _facts(loader: Any) -> LoaderFacts:
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return LoaderFacts("", False, None, None, 0, "")
    sampler = _sampler(loader)
    shards = isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas")
    samples = sized_len(dataset)
    padded = 0
    if isinstance(sampler, DistributedSampler) and samples is not None:
        padded = max(0, sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]
    return LoaderFacts(type(sampler).__name__, shards, _drawn(loader, sampler), samples, padded, data_digest(dataset))


def _sampler(loader: Any) -> Any:
    """Return the sampler in use: the batch sampler's own where the user brought one."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return loader.sampler
    return getattr(batches, "sampler", batches)


def _drawn(loader: Any, sampler: Any) -> int | None:
    """Return the samples of an epoch."""
    batches = getattr(loader, "batch_sampler", None)
    if sampler is not batches:
        return sized_len(sampler)
    count, size = sized_len(batches), getattr(batches, "batch_size", None)
    return count * size if count is not None and isinstance(size, int) else None
