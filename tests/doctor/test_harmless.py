"""A doctor that finds nothing has changed nothing."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from typing_extensions import override

from lightning_commopt.callbacks import CommMonitor, DistributedDoctor, Finding
from lightning_commopt.callbacks.doctor.doctor import CHECKS
from lightning_commopt.callbacks.doctor.loss import LossCheck
from tests.doctor.toy import Examined, Net, answers, data, examine, found, seed_streams
from tests.pool import WorkerPool, trainer

pytestmark = pytest.mark.runs("callbacks", "DistributedDoctor")

NAMES = [check.name for check in CHECKS]


def run_case(strategy: str, looks: DistributedDoctor | None, **options: Any) -> Examined:
    """Twenty steps and validation, with random numbers of each rank's own."""
    model = Net()
    seed_streams(dist.get_rank() if dist.is_initialized() else 0)
    return examine(model, data(16 * 20), strategy, looks, **options)


def both(strategy: str) -> tuple[Examined, Examined]:
    """Without and with."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 3}
    looks = DistributedDoctor(steps=20, reference_steps=12, hash_every_n_steps=3, probe_seconds=0.2)
    return run_case(strategy, None, **options), run_case(strategy, looks, **options)


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_same_bits_and_no_finding(pool: WorkerPool, strategy: str) -> None:
    ranks = pool.run(both, 2, strategy)
    for without, examined in ranks:
        assert torch.equal(without.parameters, examined.parameters)
        assert without.losses == examined.losses
        assert without.streams == examined.streams
        assert not found(examined.findings)
        assert list(dict.fromkeys(finding.check for finding in examined.findings)) == NAMES
        assert all(finding.checked for finding in examined.findings)
    assert ranks[0][1].findings == ranks[1][1].findings
    first, last = pool.output[0].split("DistributedDoctor, ")[1:]
    assert first.startswith("first 20 steps on 2 ranks: no check found anything wrong\n")
    assert last.startswith("whole fit of 30 steps on 2 ranks: no check found anything wrong\n")
    assert "DistributedDoctor, " not in pool.output[1]


def leftovers() -> tuple[list[str], int, bool]:
    """What is wrapped or hooked after a fit, and the groups that are left."""
    model = Net()
    seed_streams(dist.get_rank())
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    wrapped: list[str] = []

    class Look(Callback):
        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            wrapped.extend(name for name in ("_setup_model", "training_step") if name in vars(trainer.strategy))

    examine(model, doctor=DistributedDoctor(4, reference_steps=4, probe_seconds=0.1), callbacks=[CommMonitor(), Look()])
    hooks = any(parameter._backward_hooks for parameter in model.parameters())
    return wrapped, len(torch.distributed.distributed_c10d._world.pg_map) - groups, hooks


def test_nothing_is_left_behind(pool: WorkerPool) -> None:
    assert pool.run(leftovers, 2) == [([], 0, False)] * 2


def test_one_process_says_what_cannot_be_checked() -> None:
    looks = DistributedDoctor(4, probe_seconds=0)
    model = Net()
    seed_streams(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = examine_alone(model, looks)
    assert not found(findings)
    unchecked = {finding.check for finding in findings if not finding.checked}
    assert unchecked == {"data", "seeds", "synchronisation", "collectives", "environment", "reference", "loss"}
    assert all(
        finding.message.startswith("one process")
        for check in ("seeds", "collectives", "environment")
        for finding in answers(findings, check)
    )


def examine_alone(model: Net, looks: DistributedDoctor) -> list[Finding]:
    """Fit in this process."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fitter = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[looks], **quiet, enable_model_summary=False)
    fitter.fit(model, data())
    return looks.findings


class ByHand(Net):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        optimizer.step()


class Fails(Net):
    """Cannot be repeated: it notices that it is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not isinstance(vars(self).get("log"), type(None)):
            raise ValueError("planted")
        return super().training_step(batch, batch_idx)


def reasons(case: str) -> list[Finding]:
    """Fit what has no reference."""
    model = {"manual": ByHand, "fails": Fails, "scaler": Net}[case]()
    seed_streams(dist.get_rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # the first steps overflow
    options: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if case == "scaler" else {}
    return examine(model, doctor=DistributedDoctor(8, reference_steps=3, probe_seconds=0), **options).findings


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("manual", "manual optimisation takes steps of its own."),
        ("scaler", "a gradient scaler decides which steps count."),
        ("fails", "the steps cannot be repeated in one process: ValueError: planted"),
    ],
)
def test_a_reference_that_cannot_be_made_says_why(pool: WorkerPool, case: str, why: str) -> None:
    zero, one = pool.run(reasons, 2, case)
    assert zero == one
    (answer,) = answers(zero, "reference")
    assert (answer.checked, answer.message) == (False, why)
    assert not found(zero)


class Closure(Net):
    """Computes through a function that holds on to this very module."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Tensor] = lambda x: self.loss(x)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.function(batch[0])
        return loss


class Stops(Callback):
    """Ends the fit before gradients were accumulated."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = True


def odd_references(case: str, strategy: str) -> Examined:
    """Fit what a copy of the module does not stand for, or not long enough."""
    model: Any = Closure() if case == "closure" else Net()
    seed_streams(dist.get_rank())
    options: dict[str, Any] = {"callbacks": [Stops()], "accumulate_grad_batches": 3} if case == "stops" else {}
    made: Any = torch.compile(model, backend="eager") if case == "compiled" else model
    looks = DistributedDoctor(8, reference_steps=4, probe_seconds=0)
    fitter = trainer(2, strategy, callbacks=[*options.pop("callbacks", []), looks], max_epochs=1, **options)
    fitter.fit(made, data())
    streams = float(torch.rand(())), 0.0, 0.0
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Examined(looks.findings, parameters, model.losses, streams)


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_a_module_that_is_tied_to_its_own_parameters_says_so(pool: WorkerPool, strategy: str) -> None:
    for examined in pool.run(odd_references, 2, "closure", strategy):
        (answer,) = answers(examined.findings, "reference")
        assert not answer.checked
        assert "the copy of the module computes with parameters of the original" in answer.message


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_a_compiled_module_has_a_reference(pool: WorkerPool, strategy: str) -> None:
    plain = pool.run(odd_references, 2, "plain", strategy)
    for examined, other in zip(pool.run(odd_references, 2, "compiled", strategy), plain, strict=True):
        (answer,) = answers(examined.findings, "reference")
        assert answer.checked
        assert not answer.found
        assert torch.equal(examined.parameters, other.parameters)


def test_a_fit_that_ends_before_its_first_step_has_no_reference(pool: WorkerPool) -> None:
    for examined in pool.run(odd_references, 2, "stops", "ddp"):
        (answer,) = answers(examined.findings, "reference")
        assert (answer.checked, answer.message) == (False, "no step was taken.")


def step_beside_a_doctor(first: bool) -> float:
    """A step as the monitor measures it, where the doctor takes its time for the table."""
    findings = LossCheck.findings

    def slow(self: LossCheck) -> list[Finding]:
        time.sleep(1.0)
        return findings(self)

    LossCheck.findings = slow  # type: ignore[method-assign]
    monitor, looks = CommMonitor(table=False), DistributedDoctor(5, probe_seconds=0)
    seed_streams(dist.get_rank())
    fitter = trainer(2, "ddp", callbacks=[monitor, looks] if first else [looks, monitor], max_epochs=1)
    fitter.fit(Net(), data())
    assert monitor.summary is not None
    assert monitor.summary.step_ms is not None
    return monitor.summary.step_ms


@pytest.mark.parametrize("first", [True, False])
def test_the_table_takes_no_time_of_steps(pool: WorkerPool, first: bool) -> None:
    assert max(pool.run(step_beside_a_doctor, 2, first)) < 180  # 200 and more where it is counted


@pytest.mark.parametrize(
    ("option", "value"), [("steps", 0), ("probe_seconds", 6.0), ("hash_every_n_steps", 0), ("reference_steps", -1)]
)
def test_options_have_bounds(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{option}` must be"):
        DistributedDoctor(**{option: value})  # type: ignore[arg-type]
