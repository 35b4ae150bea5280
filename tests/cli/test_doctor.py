"""`commopt doctor`."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_commopt.callbacks.doctor.machines import examine, machine
from lightning_commopt.cli import main
from tests.laws import faults
from tests.laws.faults import planted
from tests.pool import WorkerPool

pytest.importorskip("jsonargparse")


def main_on_a_rank(*words: str) -> int:
    """The command, as torchrun starts it on each rank."""
    return main(words)


def test_selftest_starts_its_own_ranks(pool: WorkerPool) -> None:
    words = ("doctor", "--selftest", "--methods", "bf16,topk", "--device", "cpu", "--json")
    assert pool.run(main_on_a_rank, 1, *words, group=False) == [0]
    text = pool.output[0]
    found = json.loads(text[text.index("{\n") :])
    assert (found["world"], found["backend"], found["failed"]) == (2, "gloo", 0)
    assert found["routes"] == {"bf16": "one all-gather", "topk-density=0.05": "one all-gather"}
    assert {outcome["status"] for outcome in found["outcomes"]} == {"passed"}
    assert found["between_nodes"] == "there is one node"


def test_selftest_uses_the_ranks_of_torchrun(pool: WorkerPool) -> None:
    words = ("doctor", "--selftest", "--methods", "int8", "--device", "cpu")
    codes = pool.run(planted, 2, faults.own_value, main_on_a_rank, *words, group=False)
    assert codes == [1, 0]
    assert "FAILED `replicas`, int8: rank 1: its parameters have other bits" in pool.output[0]
    assert pool.output[1] == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--selftest", "--methods", "int9"], "`--methods int9` is no method: choose from none, bf16"),
        (["--selftest", "--methods", ","], "`--methods ,` names nothing: write words with commas between them"),
        (["--selftest", "--methods", " "], "`--methods  ` names nothing"),
        (["--selftest", "--processes", "1"], "set `--processes` to 2 or more"),
        (["--selftest", "--processes", "3", "--ranks-per-node", "2"], "must divide the number of ranks, which is 3"),
        (["--selftest", "--timeout", "0"], "must be a number of seconds above 0"),
    ],
)
def test_wrong_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err


def test_machines_are_described(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (rank,) = found["ranks"]
    assert rank["versions"]["torch"] == torch.__version__
    assert rank["cores"] >= 1
    checks = {finding["check"]: finding["checked"] for finding in found["findings"]}
    assert checks == {"network": True, "versions": False, "GPUs": True, "clocks": False}


def test_machines_are_compared(pool: WorkerPool) -> None:
    assert pool.run(main_on_a_rank, 2, "doctor", group=False) == [0, 0]
    assert "2 on 1 node" in pool.output[0]
    assert "within 1 s of each other" in pool.output[0]
    assert pool.output[1] == ""


def test_differences_are_found() -> None:
    here = machine()
    there = replace(here, versions={**here.versions, "torch": "1.0"}, gpus=("H", "H"), backends=("gloo",))
    found = [finding for finding in examine([here, there], [0.0, -4.0]) if finding.found]
    assert [(finding.check, finding.rank, finding.number) for finding in found] == [
        ("versions", 1, None),
        ("GPUs", 1, None),
        ("clocks", 1, -4.0),
    ]
    assert found[0].message == f"torch is 1.0 on rank 1, and {torch.__version__} on rank 0"
    assert found[2].message == "the clock of rank 1 is 4.0 s behind rank 0's"
