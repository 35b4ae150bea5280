"""A backend that is not there, or that cannot carry a device's tensors, is an error that says what to do."""

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_commopt import CommOptDeepSpeedStrategy, CommOptShardedStrategy, CommOptStrategy
from lightning_commopt.strategies.backends import check_backend

pytestmark = pytest.mark.runs("commopt", "options refused")


@pytest.mark.parametrize(
    ("backend", "device", "told"),
    [
        ("mpi", None, r"`process_group_backend='mpi'`: .* no MPI .*`mpirun` starts processes without it.*NCCL then"),
        ("cpu:mpi,cuda:nccl", "cpu", "no MPI"),
        ("glooo", None, "no backend `glooo`, only gloo"),
        ("nccl", "cpu", "NCCL carries no tensors of the CPU.*gloo on the CPU"),
        ("cpu:nccl,cuda:nccl", "cpu", "NCCL carries no tensors of the CPU"),
        ("nccl", "cuda", "no backend `nccl`, only gloo"),
        (None, "cuda", "no NCCL.*install one that has, or"),
    ],
)
def test_what_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, device: str | None, told: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: device == "cpu")
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(ValueError, match=told):
        check_backend(backend, device)


@pytest.mark.parametrize(
    ("backend", "device"),
    [(None, None), (None, "cpu"), ("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")],
)
def test_what_is_there_is_accepted(monkeypatch: pytest.MonkeyPatch, backend: str | None, device: str | None) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    check_backend(backend, device)


@pytest.mark.parametrize("kind", [CommOptStrategy, CommOptShardedStrategy, CommOptDeepSpeedStrategy])
def test_every_strategy_refuses_before_it_starts_processes(kind: type[CommOptStrategy]) -> None:
    with pytest.raises(ValueError, match="`process_group_backend='mpi'`"):  # noqa: PT012  # now, or when it would start
        strategy = kind(compression="none", process_group_backend="mpi")
        Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False).fit(BoringModel())
