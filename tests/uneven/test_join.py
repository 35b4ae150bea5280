"""`uneven="join"`: a rank that has ended counts no more, and gradients are means over the batches that do."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_commopt import Uncompressed
from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.chosen import SHAPES, Chosen, Ledger, assert_conserved, chosen_gradient
from tests.strategies.toy import ByHand, Regression, compresses, each_method, fit, flat, state_of, strategy_of
from tests.uneven.toy import COUNTS, FITS, METHODS, Ran, Stream, own_batches, reference, run, train_loader, uneven_fit

pytestmark = pytest.mark.runs("commopt", "uneven data")

NONE = METHODS[0]


class LossKept(pl.Callback):
    """Notes where Lightning's loss is not the one that the module computed."""

    def __init__(self) -> None:
        self.changed: list[int] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Regression)
        if abs(float(outputs["loss"]) * trainer.accumulate_grad_batches - pl_module.losses[-1]) > 1e-6:
            self.changed.append(batch_idx)


def fit_joined(case: Case, counts: Sequence[int], window: int) -> tuple[Ran, Ran, list[int], int]:
    """With a length and without; where the loss changed; rounds of exchange."""
    kept, strategy = LossKept(), strategy_of(case, uneven="join")
    options: dict[str, Any] = {"accumulate_grad_batches": window}
    sized = run(strategy, train_loader(own_batches(counts)), callbacks=[kept], **options)
    unsized = uneven_fit(case, counts, "join", sized=False, **options)
    return sized, unsized, kept.changed, strategy.comm_stats().rounds


@pytest.mark.parametrize(("case", "counts", "window"), FITS)
def test_joined_is_one_process_on_all_batches(
    pool: WorkerPool, case: Case, counts: tuple[int, ...], window: int
) -> None:
    ranks, longest = pool.run(fit_joined, len(counts), case, counts, window), max(counts)
    expected, begin = pool.run(reference, 1, counts, window)[0], flat(Regression())
    for sized, unsized, changed, rounds in ranks:
        assert torch.equal(sized.parameters, unsized.parameters)
        assert torch.equal(sized.parameters, ranks[0][0].parameters)
        assert sized.events == unsized.events == ranks[0][0].events
        assert sized.when("ended") == [(0, longest - 1), (1, longest - 1)]
        assert sized.when("validated") == sized.when("ended")
        assert sized.steps == unsized.steps == rounds == 2 * -(-longest // window)
        assert not changed
        off = (sized.parameters - expected).norm() / (expected - begin).norm()
        assert off < (1e-5 if not compresses(case) else 0.05 if case.method.loss_safety == "B" else 1.0)


class Exploding(Chosen):
    """Repeated batches, and only those, have a loss and gradients that are not finite."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.own = own

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch_idx) * (1.0 if batch_idx < self.own else float("inf"))


JOINED = {2: (4, 7), 3: (7, 4, 6), 4: (7, 4, 5, 2)}
WINDOW = 3


def joined_truth(counts: Sequence[int], window: int) -> Mapping[str, Tensor]:
    """What all windows together must apply, in fp64."""
    truth = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for start in range(0, max(counts), window):
        length = min(window, max(counts) - start)
        own = [(i, r) for r, n in enumerate(counts) for i in range(start, min(n, start + length))]
        for name, total in truth.items():
            for number, rank in own:
                total += chosen_gradient(name, number, rank).double() * (length / window / len(own))
    return truth


def ledgers_of_joined(case: Case, counts: Sequence[int]) -> list[Ledger]:
    """With a length and windows of one, without and windows of three."""
    ledgers = []
    for sized, window in ((True, 1), (False, WINDOW)):
        own = counts[dist.get_rank()]
        model, ours, data = Exploding(own), strategy_of(case, uneven="join"), [torch.zeros(1)] * own
        ran = fit(ours, model, data if sized else Stream(data), accumulate_grad_batches=window)  # type: ignore[arg-type]
        applied = {name: -p.detach().double() for name, p in model.named_parameters()}
        ledgers.append(Ledger(applied, state_of(ours), ours.comm_stats(), ran))
    return ledgers


@each_method()
def test_joined_is_conserved_over_every_method(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(ledgers_of_joined, world, case, JOINED[world])
    for ledgers, window in zip(zip(*ranks, strict=True), (1, WINDOW), strict=True):
        assert_conserved(ledgers, joined_truth(JOINED[world], window), case)


def fit_by_hand(case: Case, counts: Sequence[int]) -> tuple[Ran, Ran]:
    """Manual optimisation with a step a batch, and the same done by Lightning."""
    by_hand = run(strategy_of(case, uneven="join"), train_loader(own_batches(counts)), ByHand("sgd"))
    return by_hand, uneven_fit(case, counts, "join")


@pytest.mark.parametrize("case", METHODS[:2], ids=lambda case: case.id)
def test_joined_by_hand(pool: WorkerPool, case: Case) -> None:
    for by_hand, automatic in pool.run(fit_by_hand, 3, case, COUNTS[1]):
        assert torch.equal(by_hand.parameters, automatic.parameters)


def fit_with_true_mean(counts: Sequence[int]) -> dict[str, Ran]:
    """The last, short window divided by its real length."""
    options: dict[str, Any] = {"strategy": {"true_mean": True}, "accumulate_grad_batches": 4}
    return {policy: uneven_fit(NONE, counts, policy, **options) for policy in ("join", "trim")}


def test_true_mean_of_what_remains(pool: WorkerPool) -> None:
    counts = COUNTS[1]
    trimmed = [min(counts)] * len(counts)
    ranks = pool.run(fit_with_true_mean, len(counts), counts)
    for policy, of in (("join", counts), ("trim", trimmed)):
        expected, nominal = (pool.run(reference, 1, of, 4, true_mean=true)[0] for true in (True, False))
        for rank in ranks:
            off = (rank[policy].parameters - expected).norm()
            assert off < 1e-4 * (nominal - expected).norm()


def fit_even(policy: str) -> Ran:
    """As many batches on all ranks."""
    return uneven_fit(Case(Uncompressed()), (5, 5), policy)


def test_even_ranks_see_nothing_of_it(pool: WorkerPool) -> None:
    expected = pool.run(fit_even, 2, "error")[0]
    for ran in pool.run(fit_even, 2, "join"):
        assert torch.equal(ran.parameters, expected.parameters)
        assert ran.fetcher == expected.fetcher == "_PrefetchDataFetcher"
