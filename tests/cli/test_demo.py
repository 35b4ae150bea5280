"""`commopt demo`: what it compares, what it refuses, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.callbacks.report import ReportContent
from lightning_commopt.cli import main
from lightning_commopt.demo.launch import run_training
from lightning_commopt.demo.network import why_not
from lightning_commopt.demo.processes import LaunchError
from lightning_commopt.demo.worker import Training
from tests.cli.test_report_command import DDP, INT8

pytest.importorskip("jsonargparse")
ROOT = Path(__file__).parents[2]
LIMIT = 100.0
REASON = why_not()


def shown(monkeypatch: pytest.MonkeyPatch, *runs: ReportContent | Exception) -> list[Training]:
    """Let trainings come to this; return what was asked for, once the command has run."""
    asked: list[Training] = []

    def run(training: Training, network: object) -> ReportContent:
        asked.append(training)
        found = runs[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("lightning_commopt.cli.demo.run_training", run)
    return asked


def test_ends_with_both_and_the_gain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = shown(monkeypatch, ReportContent(DDP), ReportContent(INT8, decisions=("took int8",)))
    assert main(["demo", "--strategy", "commopt", "--steps", "12"]) == 0
    assert [(task.strategy, task.steps) for task in asked] == [("ddp", 12), ("commopt", 12)]
    said = capsys.readouterr().out
    assert "A step is 4.0 times as fast under commopt as under DDP between two processes of this machine" in said
    assert "with 4.0 times fewer bytes sent." in said
    assert "commopt decided: took int8" in said


def test_json_has_the_numbers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    unmeasured = replace(INT8, step_ms=None, sent_mb_per_step=None)
    shown(monkeypatch, ReportContent(DDP), ReportContent(unmeasured))
    assert main(["demo", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["speed_up"], answer["fewer_bytes"]) == (None, None)
    assert answer["runs"][0]["summary"]["step_ms"] == 100.0


def test_a_rank_that_fails_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown(monkeypatch, LaunchError("Rank 1 ended with 3."))
    assert main(["demo"]) == 1
    assert "Rank 1 ended with 3." in capsys.readouterr().out


def test_a_link_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    shown(monkeypatch)
    assert main(["demo", "--rate", "100mbit"]) == 2
    assert "needs root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategy", "ddp"], "choose from commopt, commopt_none"),
        (["--rate", "fast"], "`fast` is not a rate"),
        (["--steps", "3"], "`--steps 3` must be at least 10"),
        (["--batch-size", "0"], "`--batch-size 0` must be at least 1"),
    ],
)
def test_mistakes(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(monkeypatch)
    assert main(["demo", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.timeout(LIMIT + 20)
def test_two_processes_train(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    content = run_training(Training("commopt_int8", 0, 0, steps=5, batch_size=1, out=""), None, LIMIT)
    summary = content.summary
    assert (summary.method, summary.world_size, summary.steps) == ("int8", 2, 5)
    assert summary.replicas_equal
    assert summary.compression_ratio == pytest.approx(3.92, abs=0.05)
    assert sum(content.measured.numels) == 4_080_384


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"links-{pid}-")]


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.timeout(LIMIT + 20)
def test_interrupting_it_leaves_nothing() -> None:
    command = [sys.executable, "-m", "lightning_commopt.cli", "demo", "--rate", "100mbit"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    try:
        deadline = time.monotonic() + LIMIT
        while len(namespaces(process.pid)) < 3 and time.monotonic() < deadline:
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert namespaces(process.pid) == []
