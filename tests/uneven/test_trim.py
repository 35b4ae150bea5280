"""`uneven="trim"`: every rank stops after the shortest, as if no rank had more."""

from typing import Any

import pytest
import torch

from tests.methods import Case
from tests.pool import WorkerPool
from tests.uneven.toy import FITS, Ran, uneven_fit

pytestmark = pytest.mark.runs("commopt", "uneven data")


def fit_trimmed(case: Case, counts: tuple[int, ...], window: int) -> tuple[Ran, Ran, Ran]:
    """With a length, without one, and on batches that are as many on all ranks."""
    plain = [min(counts)] * len(counts)
    options: dict[str, Any] = {"accumulate_grad_batches": window}
    return (
        uneven_fit(case, counts, "trim", **options),
        uneven_fit(case, counts, "trim", sized=False, **options),
        uneven_fit(case, plain, "error", **options),
    )


@pytest.mark.parametrize(("case", "counts", "window"), FITS)
def test_trimmed_is_as_if_no_rank_had_more(pool: WorkerPool, case: Case, counts: tuple[int, ...], window: int) -> None:
    ranks = pool.run(fit_trimmed, len(counts), case, counts, window)
    for rank, (sized, unsized, plain) in enumerate(ranks):
        assert sized.fetcher == "SizedFetcher"
        assert unsized.fetcher == "UnsizedFetcher"
        assert plain.fetcher == "_PrefetchDataFetcher"
        for ran in (sized, unsized):
            assert torch.equal(ran.parameters, plain.parameters)
            assert torch.equal(ran.parameters, ranks[0][0].parameters)
            assert (ran.events, ran.steps) == (plain.events, plain.steps), rank
