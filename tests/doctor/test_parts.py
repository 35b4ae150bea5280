"""Parts of the doctor that need no ranks."""

import os
from pathlib import Path

import pytest
import torch

from lightning_commopt.callbacks.doctor.content import data_digest, sample_hashes
from lightning_commopt.callbacks.doctor.environment import RankFacts, problems
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.nccl_log import log_lines, transports
from lightning_commopt.callbacks.doctor.table import report
from tests.doctor.toy import Samples

pytestmark = pytest.mark.runs("callbacks", "DistributedDoctor")

NCCL_LOG = """\
node:11:22 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node:11:22 [0] NCCL INFO Using network Socket
node:11:30 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0
node:11:30 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] [send] via NET/Socket/0
node:11:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[2] via P2P/CUMEM/read
node:11:30 [0] NCCL INFO Channel 00 : 0[0] -> 3[3] via SHM/direct/direct
node:11:30 [0] NCCL INFO Channel 02/0 : 0[0] -> 4[0] [send] via NET/IB/0/GDRDMA
"""


def test_transports_are_read_from_the_log(tmp_path: Path) -> None:
    file = tmp_path / f"nccl.{os.getpid()}"
    file.write_text(NCCL_LOG)
    environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}
    assert transports(log_lines(environment) or []) == {"NET/Socket": 2, "P2P": 1, "SHM": 1, "NET/IB": 1}
    assert log_lines({**environment, "NCCL_DEBUG": "WARN"}) is None
    assert log_lines({"NCCL_DEBUG": "INFO"}) is None


def facts(**changed: object) -> RankFacts:
    usual = {
        "node": "a",
        "backend": "nccl",
        "interface": "eth0",
        "variables": {},
        "transports": {"P2P": 8},
        "shared_memory": 1 << 34,
        "workers": True,
        "infiniband": True,
    }
    return RankFacts(**(usual | changed))  # type: ignore[arg-type]


def test_slow_transports_and_small_shared_memory() -> None:
    ranks = [
        facts(),
        facts(shared_memory=64 << 20),
        facts(node="b", transports={"NET/Socket": 2}, variables={"NCCL_P2P_DISABLE": "1"}),
        facts(node="b", variables={"NCCL_IB_HCA": "mlx5_1", "NCCL_DEBUG": "INFO"}),  # these may differ between nodes
    ]
    seen = [(rank, number, message.split(" ")[0]) for (message, remedy), rank, number in problems(ranks)]
    assert seen == [
        (1, (64 << 20) / 1e6, "rank"),
        (2, None, "`NCCL_P2P_DISABLE`"),
        (2, None, "`NCCL_P2P_DISABLE=1`"),
        (2, None, "NCCL"),
    ]
    assert not list(problems([facts(), facts()]))
    assert not list(problems([facts(backend="gloo", workers=False, shared_memory=1 << 20)]))


def test_samples_are_told_apart_by_any_of_their_tensors() -> None:
    x = torch.zeros(3, 5000)
    x[1, 4999] = 1e-30
    one = sample_hashes([x, torch.tensor([1, 1, 2])])
    assert one is not None
    assert len(set(one)) == 3
    assert sample_hashes({"x": x, "y": torch.tensor([1, 1, 2])}) == one
    assert sample_hashes(["text"]) is None


def test_data_sets_are_told_apart_without_drawing_from_them() -> None:
    assert data_digest(Samples(9)) == data_digest(Samples(9)) != data_digest(Samples(9, seed=2))
    assert data_digest(torch.utils.data.Subset(Samples(9), [0, 1])) != data_digest(
        torch.utils.data.Subset(Samples(9), [2, 3])
    )


def test_report_puts_what_was_found_first() -> None:
    findings = [
        Finding("data", False, "all is well"),
        Finding("data", True, "rank 1 sees the data of rank 0", 1, 4.0, "shard it"),
        Finding("loss", False, "too few steps", checked=False),
    ]
    assert report(findings, "first 2 steps", width=60).splitlines() == [
        "DistributedDoctor, first 2 steps: 1 of 2 checks found something",
        "  data  FOUND        rank 1 sees the data of rank 0",
        "                     -> shard it",
        "        fine         all is well",
        "  loss  not checked  too few steps",
    ]
