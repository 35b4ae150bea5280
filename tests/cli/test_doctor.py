"""`commopt doctor`."""

import json
import subprocess
import sys
from typing import Any

import pytest

from lightning_commopt.cli import main
from tests.laws import faults
from tests.laws.faults import planted
from tests.pool import WorkerPool

pytest.importorskip("jsonargparse")


def command(*words: str, timeout: float = 100) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a command in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "lightning_commopt.cli", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.stdout.startswith("{"), ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def test_selftest_starts_its_own_ranks() -> None:
    code, found = command("doctor", "--selftest", "--methods", "bf16,topk", "--device", "cpu")
    assert code == 0
    assert (found["world"], found["backend"], found["failed"]) == (2, "gloo", 0)
    assert found["routes"] == {"bf16": "one all-gather", "topk-density=0.05": "one all-gather"}
    assert {outcome["status"] for outcome in found["outcomes"]} == {"passed"}
    assert found["between_nodes"] == "there is one node"


def main_on_a_rank(*words: str) -> int:
    """The command, as torchrun starts it on each rank."""
    return main(words)


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
        (["--selftest", "--processes", "1"], "set `--processes` to 2 or more"),
        (["--selftest", "--processes", "3", "--ranks-per-node", "2"], "must divide the number of ranks, which is 3"),
        (["--selftest", "--timeout", "0"], "must be a number of seconds above 0"),
    ],
)
def test_wrong_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err
