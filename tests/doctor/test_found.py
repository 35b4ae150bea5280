"""A fault is planted for each check: it is found, at the right rank and place, with the right number."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler
from typing_extensions import override

from lightning_commopt.callbacks import DistributedDoctor, Finding
from tests.doctor.toy import Net, Samples, answers, data, examine, found, seed_streams
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("callbacks", "DistributedDoctor")


def doctor(**options: Any) -> DistributedDoctor:
    """Quick: no test of the links."""
    return DistributedDoctor(**({"steps": 6, "hash_every_n_steps": 2, "probe_seconds": 0.0} | options))


# ---- the data -------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[list[Tensor]]):
    """The same samples for everybody."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        yield from map(list, zip(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)), strict=True))


def own_shard() -> Any:
    """Another half of the samples on each rank, put together by hand."""
    return data(dataset=Samples(64, seed=dist.get_rank()))


LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream": (lambda: data(dataset=Stream()), {}),
    "sampler": (lambda: data(64, sampler=RandomSampler(Samples(64))), {"use_distributed_sampler": False}),
    "padded": (lambda: data(63), {}),
    "batches": (
        lambda: data(dataset=Samples(64 + 64 * dist.get_rank(), seed=dist.get_rank())),
        {"use_distributed_sampler": False, "max_steps": 4, "max_epochs": None},
    ),
    "sizes": (
        lambda: torch.utils.data.DataLoader(Samples(64, dist.get_rank()), 8 + 8 * dist.get_rank()),
        {"use_distributed_sampler": False, "limit_train_batches": 4},
    ),
    "own": (own_shard, {"use_distributed_sampler": False}),
}


def data_case(case: str) -> list[Finding]:
    """Fit with one of the loaders."""
    loader, options = LOADERS[case]
    model = Net()
    seed_streams(dist.get_rank())
    examined = examine(model, loader(), doctor=doctor(steps=4), **options)
    return answers(examined.findings, "data")


@pytest.mark.parametrize(
    ("case", "rank", "number", "text"),
    [
        ("stream", 1, 4.0, "rank 1 sees the data of rank 0: batch 0 is the same (and 4 of the first 4)"),
        ("sampler", None, 2.0, "`RandomSampler` does not share samples out: 2 ranks draw 128 samples an epoch from 64"),
        ("padded", None, 1.0, "`DistributedSampler` repeats 1 of 63 samples in every epoch (2%)"),
        ("batches", 0, 8.0, "rank 0 has 8 batches an epoch, another has 16"),
        ("sizes", 1, 2.0, "rank 1 saw 64 samples while another saw 32"),
    ],
)
def test_data(pool: WorkerPool, case: str, rank: int | None, number: float, text: str) -> None:
    zero, one = pool.run(data_case, 2, case)
    assert zero == one
    seen = [finding for finding in found(zero) if text in finding.message]
    assert [(finding.rank, finding.number, bool(finding.remedy)) for finding in seen] == [(rank, number, True)]


def test_shards_made_by_hand_are_fine(pool: WorkerPool) -> None:
    assert not found(pool.run(data_case, 2, "own")[0])


# ---- seeds ----------------------------------------------------------------------------------------------------------


def seed_case(initial: int, streams: int) -> list[Finding]:
    """Weights and streams made with these offsets on rank 1."""
    model = Net()
    if dist.get_rank() == 1 and initial:
        with torch.no_grad():
            model.norm.weight[3] += initial
            model.second.bias[0] += initial
    seed_streams(streams * dist.get_rank())
    return answers(examine(model, doctor=doctor()).findings, "seeds")


def test_different_initial_parameters(pool: WorkerPool) -> None:
    (finding,) = found(pool.run(seed_case, 2, 1, 1)[1])
    assert "`norm.weight` began differently on rank 1" in finding.message
    assert finding.rank == 1


def test_equal_random_streams_that_are_drawn_from(pool: WorkerPool) -> None:
    (finding,) = found(pool.run(seed_case, 2, 0, 0)[1])
    assert "rank 1 draws the same random numbers as rank 0 (`torch`)" in finding.message
    assert (finding.rank, finding.number) == (1, 1)


def worker_case(seeded: bool) -> list[str]:
    """Loaders with worker processes on ranks with equal streams, seeded by Lightning or not."""
    if seeded:
        os.environ["PL_SEED_WORKERS"] = "1"
    model = Net()
    seed_streams(0)
    looks = doctor(steps=2)
    examined = examine(model, data(64, num_workers=1), doctor=looks, max_steps=2, max_epochs=None)
    return [finding.message for finding in found(answers(examined.findings, "seeds"))]


@pytest.mark.parametrize("seeded", [False, True])
def test_equal_seeds_of_loader_workers(pool: WorkerPool, seeded: bool) -> None:
    messages = pool.run(worker_case, 2, seeded)[0]
    of_workers = [m for m in messages if m.startswith("the workers of the data loaders of rank 1 have the seeds of")]
    assert len(of_workers) == (not seeded)


class Steady(Net):
    """Draws no random numbers in training, but has a validation whose loader does."""

    @override
    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.second(self.norm(self.first(x)).tanh()) - x).square().mean()
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    @override
    def val_dataloader(self) -> Any:
        return data(16)


def steady_case() -> list[Finding]:
    """Equal streams, from which only iterators over loaders draw."""
    model = Steady()
    seed_streams(0)
    examined = examine(model, data(64), doctor=doctor(steps=8), val_check_interval=2, max_epochs=3)
    return answers(examined.findings, "seeds")


def test_equal_streams_that_nobody_draws_from_are_fine(pool: WorkerPool) -> None:
    assert not found(pool.run(steady_case, 2)[0])


# ---- gradients ------------------------------------------------------------------------------------------------------


class Spoilt(Net):
    """Multiplies the gradient of a parameter on one rank in some steps."""

    def __init__(self, name: str, rank: int | None, factor: float, first: int = 1, steps: int = 99) -> None:
        super().__init__()
        self.spoilt, self.rank, self.factor, self.when = name, rank, factor, range(first - 1, first - 1 + steps)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in self.when or self.rank not in (None, self.global_rank):
            return loss
        if not self.spoilt:
            return loss * self.factor
        parameter = self.get_parameter(self.spoilt)
        spoilt: Tensor = loss + self.factor * parameter.sum()
        return spoilt


class Unused(Net):
    """Has a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2, bias=False)

    @override
    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = super().loss(x) + 0 * self.head(x).sum()
        return loss


GRADIENTS: dict[str, Any] = {
    "nan": lambda: Spoilt("first.weight", 1, float("nan"), first=3, steps=1),
    "large": lambda: Spoilt("", 1, 100.0),
    "flat": lambda: Spoilt("", 1, 0.0, first=2, steps=4),
    "zero": Unused,
}


def gradient_case(case: str) -> list[Finding]:
    """Fit with one of the models."""
    model = GRADIENTS[case]()
    seed_streams(dist.get_rank())
    return answers(examine(model, doctor=doctor()).findings, "gradients")


@pytest.mark.parametrize(
    ("case", "rank", "number", "text"),
    [
        ("nan", 1, 3, "the gradient of `first.weight` on rank 1 is NaN or infinite in step 3"),
        ("flat", 1, 4, "the gradient of rank 1 is 0 for 4 steps in a row"),
        ("zero", None, 1, "1 of 7 parameters had no gradient but 0 on any rank: `head.weight`"),
    ],
)
def test_gradients(pool: WorkerPool, case: str, rank: int | None, number: float, text: str) -> None:
    seen = [finding for finding in found(pool.run(gradient_case, 2, case)[0]) if text in finding.message]
    assert [(finding.rank, finding.number) for finding in seen] == [(rank, number)]


def test_a_gradient_far_larger_than_the_others(pool: WorkerPool) -> None:
    (finding,) = found(pool.run(gradient_case, 2, "large")[0])
    assert finding.rank == 1
    assert finding.number == pytest.approx(100, rel=0.5)


# ---- replicas -------------------------------------------------------------------------------------------------------


class Drift(Callback):
    """Changes a parameter of one rank in the fifth step."""

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.second.weight[0, 0] += 1e-6


def drift_case(every: int) -> list[Finding]:
    """Drift that shows at the end only, or within the first steps."""
    model = Net()
    seed_streams(dist.get_rank())
    looks = doctor(steps=3, hash_every_n_steps=every)
    return answers(examine(model, doctor=looks, callbacks=[Drift()]).findings, "synchronisation")


@pytest.mark.parametrize(("every", "step"), [(1, 5), (2, 6)])
def test_drift(pool: WorkerPool, every: int, step: int) -> None:
    (finding,) = found(pool.run(drift_case, 2, every)[0])
    assert (finding.rank, finding.number) == (1, step)
    assert finding.message.startswith("`second.weight` on rank 1") or step == 6


# ---- collectives ----------------------------------------------------------------------------------------------------


class Talkative(Net):
    """Talks to other ranks in every step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "buffers":
            self.norm = nn.Identity()  # type: ignore[assignment]
            self.register_buffer("table", torch.ones(3))
        self.automatic_optimization = what != "rounds"

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.what == "logging":
            self.log("loss", loss, sync_dist=True)
        if self.what == "user":
            dist.all_reduce(torch.zeros(2))
        if self.what == "rounds":
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()
        return loss


def collective_case(what: str, strategy: str) -> list[Finding]:
    """Fit with one of them."""
    model = Talkative(what)
    seed_streams(dist.get_rank())
    return answers(examine(model, strategy=strategy, doctor=doctor()).findings, "collectives")


@pytest.mark.parametrize(
    ("what", "strategy", "number", "text"),
    [
        ("logging", "ddp", 2, "`self.log(..., sync_dist=True)` at test_found.py:"),
        ("buffers", "ddp", 1, "buffers are broadcast 1 times a step and never change"),
        ("unused", "ddp_find_unused_parameters_true", 1, "`find_unused_parameters=True` costs 1 collectives a step"),
        ("rounds", "ddp", 2, "gradients are exchanged 2 times for one optimizer step"),
        ("user", "ddp", 1, "`all_reduce` at test_found.py:"),
        ("user", "commopt_int8", 1, "`all_reduce` at test_found.py:"),
    ],
)
def test_collectives(pool: WorkerPool, what: str, strategy: str, number: int, text: str) -> None:
    zero, one = pool.run(collective_case, 2, what, strategy)
    assert zero == one
    (finding,) = found(zero)
    assert finding.message.startswith(text)
    assert finding.number == number
    assert any("collectives an optimizer step: " in other.message for other in zero)


class Branches(Net):
    """Uses a layer in every second batch, or on one rank only."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.extra = nn.Linear(8, 8)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        odd = (batch_idx if self.by == "batch" else self.global_rank) % 2
        return super().training_step([self.extra(batch[0])] if odd else batch, batch_idx)


def branches_case(by: str) -> list[Finding]:
    model = Branches(by)
    seed_streams(dist.get_rank())
    looks = doctor()
    return answers(examine(model, strategy="ddp_find_unused_parameters_true", doctor=looks).findings, "collectives")


@pytest.mark.parametrize("by", ["batch", "rank"])
def test_a_search_for_unused_parameters_that_is_needed_is_no_finding(pool: WorkerPool, by: str) -> None:
    zero, one = pool.run(branches_case, 2, by)
    assert zero == one
    assert not found(zero)


# ---- one process ----------------------------------------------------------------------------------------------------


class Tampered(Net):
    """Its gradients are doubled after they were exchanged."""

    @override
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3)


class Scheduled(Net):
    """Its learning rate changes in every step."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def reference_case(model: type[Net], strategy: str, accumulate: int) -> list[Finding]:
    """Repeat the first five steps in one process."""
    made = model()
    seed_streams(dist.get_rank())
    looks = doctor(steps=2, reference_steps=4, reference_tolerance=1e-3)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 10.0}
    return answers(examine(made, data(256), strategy, looks, **options).findings, "reference")


def test_loss_that_parts_from_one_process(pool: WorkerPool) -> None:
    zero, one = pool.run(reference_case, 2, Tampered, "ddp", 1)
    assert zero == one
    (finding,) = found(zero)
    assert finding.number == 2
    assert "parts from that of one process at step 2" in finding.message


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("commopt_bf16", 2)])
def test_loss_equal_to_that_of_one_process(pool: WorkerPool, strategy: str, accumulate: int) -> None:
    (answer,) = pool.run(reference_case, 2, Scheduled, strategy, accumulate)[0]
    assert not answer.found
    assert answer.number is not None
    assert answer.number < (1e-6 if strategy == "ddp" else 1e-3)


# ---- loss -----------------------------------------------------------------------------------------------------------


def loss_case(lr: float) -> list[Finding]:
    """A rate that is far too high."""
    model = Net(lr)
    model.norm = nn.Identity()  # type: ignore[assignment]
    seed_streams(dist.get_rank())
    return answers(examine(model, data(16 * 20), doctor=doctor(steps=20)).findings, "loss")


def test_divergence(pool: WorkerPool) -> None:
    (finding,) = found(pool.run(loss_case, 2, 3.0)[0])
    assert finding.message.startswith("divergence: the loss rose")
    assert finding.number == 20
    assert "learning rate" in finding.remedy


# ---- environment ----------------------------------------------------------------------------------------------------


def environment_case() -> list[Finding]:
    """The last rank has a variable that rank 0 has not; two nodes are pretended, though `lo` joins none."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.environ["NCCL_ALGO"] = "Tree"
    model = Net()
    seed_streams(dist.get_rank())
    looks = doctor(probe_seconds=0.4)
    return answers(examine(model, doctor=looks, num_nodes=2).findings, "environment")


@pytest.mark.parametrize("world", [2, 4])
def test_environment(pool: WorkerPool, world: int) -> None:
    ranks = pool.run(environment_case, world, nodes=2)
    findings = ranks[0]
    assert all(other == findings for other in ranks)
    last = world - 1
    assert [
        (finding.rank, finding.message.split(",")[0]) for finding in found(findings) if "links" not in finding.message
    ] == [
        *((rank, f"rank {rank} talks to other nodes through the interface `lo`") for rank in range(last)),
        (last, f"`NCCL_ALGO` is Tree on rank {last}"),
        (last, f"rank {last} talks to other nodes through the interface `lo`"),
    ]
    links = [finding for finding in findings if finding.message.startswith("links ") and not finding.found]
    assert [finding.message.split(":")[0] for finding in links] == [
        *(["links inside a node"] if world == 4 else []),
        "links between nodes",
    ]
    assert all(finding.number is not None and finding.number > 0 for finding in links)
