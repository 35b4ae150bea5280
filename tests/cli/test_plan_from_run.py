"""``commopt plan --from run.json``."""

import json
from pathlib import Path

import pytest

from lightning_commopt.callbacks.monitor.averages import RankTimes
from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report.content import Measured, ReportContent
from lightning_commopt.callbacks.report.run_file import write_run
from lightning_commopt.cli import main
from lightning_commopt.compression import Int8, Uncompressed
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Link, Plan, bucket_numels, predict

pytest.importorskip("jsonargparse")

NUMELS = (500_000,) * 4
CHANNEL = Channel(1e8, 0.05, 2.0)
PROFILE = ComputeProfile(10.0, 20.0, 2.0, contention=0.5)
CODEC = CodecCost(1.0, 1.0, 1.0, 50.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks, a host each, under `auto`, which stayed dense."""
    summary = CommSummary(
        method="none",
        world_size=2,
        steps=50,
        skipped_steps=0,
        memory_mb=0.0,
        step_ms=150.0,
        compute_ms=32.0,
        exposed_comm_ms=118.0,
        waiting_ms=0.0,
        by_rank=(RankTimes(150.0, 32.0, 118.0, 0.0),) * 2,
    )
    measured = Measured(NUMELS, 4 * sum(NUMELS), 8.0, Link(2, CHANNEL, CHANNEL), PROFILE, (("int8", CODEC),))
    environment = (("ranks", "2 on 2 hosts"), ("devices", "cpu"), ("precision", "32-true"))
    write_run(tmp_path / "run.json", ReportContent(summary, measured=measured, environment=environment))
    return tmp_path / "run.json"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_what_was_measured_is_what_the_plan_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--from", str(run))
    assert data["model"]["params"] == sum(NUMELS)  # type: ignore[index]
    cluster = data["cluster"]
    assert isinstance(cluster, dict)
    assert (cluster["devices"], cluster["per_node"], cluster["kind"]) == (2, 1, "cpu")
    assert cluster["inter_rate"] == 1e8
    assert data["training"]["global_batch"] == 16  # type: ignore[index]
    told = data["run"]
    assert isinstance(told, dict)
    assert told["measured_ms"] == 150.0
    assert told["same_cluster"]


def test_it_predicts_what_auto_would(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to where buckets end, and the optimizer, which a plan takes from the speed of memory."""
    rows = planned(capsys, "--from", str(run))["rows"]
    assert isinstance(rows, list)
    link = Link(2, CHANNEL, CHANNEL)
    for method, codec in ((Uncompressed(), CodecCost()), (Int8(), CODEC)):
        told = predict(PROFILE, link, Plan(method, bucket_numels(NUMELS, 25), codec, overlapped=True))
        (row,) = [row for row in rows if row["kind"] == "data" and row["method"] == method.name]
        assert row["step_ms"] == pytest.approx(told.step_ms - PROFILE.optimizer_ms, rel=0.08)


def test_options_go_before_what_was_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--from", str(run), "--gpus", "4", "--inter", "10Gbit", "--batch-per-gpu", "2")
    assert data["cluster"]["devices"] == 4  # type: ignore[index]
    assert data["cluster"]["inter_rate"] == 1.25e9  # type: ignore[index]
    assert data["training"]["global_batch"] == 8  # type: ignore[index]
    assert not data["run"]["same_cluster"]  # type: ignore[index]


def test_compute_of_another_model_grows_with_its_parameters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--from", str(run), "--params", "20M")
    assert data["training"]["compute_ms"] == pytest.approx(10 * (PROFILE.forward_ms + PROFILE.backward_ms))  # type: ignore[index]
    assert main(["plan", "--from", str(run), "--params", "20M"]) == 0
    assert "its compute is taken 10 times" in capsys.readouterr().out


def test_what_the_run_does_not_tell_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--from", str(run))
    assumed = data["assumed"]
    assert isinstance(assumed, list)
    options = {one["option"] for one in assumed}
    assert {"--gpu-memory", "--seq", "--vocab", "--layers", "--optimizer"} <= options
    assert not options & {"--accelerator", "--precision", "--batch-per-gpu", "--tflops", "--inter-latency-us"}
    assert main(["plan", "--from", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "80 GB of memory a device (`--gpu-memory`)" in out
    assert "Warning: these devices are CPU processes, and the numbers of `--gpu-memory`" in out
    assert main(["plan", "--from", str(run), "--gpu-memory", "8GB", "--gpu-memory-bandwidth", "20GB/s"]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_latency_inside_a_host_is_not_taken_for_that_between_hosts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_text(run.read_text().replace("2 on 2 hosts", "2 on 1 host"))
    data = planned(capsys, "--from", str(run), "--gpus", "4", "--inter", "1Gbit")
    cluster = data["cluster"]
    assert isinstance(cluster, dict)
    assert cluster["intra_latency_ms"] == pytest.approx(CHANNEL.latency_ms)
    assert cluster["inter_latency_ms"] == 0.02


def test_a_precision_that_a_plan_does_not_know_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_text(run.read_text().replace("32-true", "64-true"))
    assumed = planned(capsys, "--from", str(run))["assumed"]
    assert {"option": "--precision", "words": "precision bf16-mixed"} in assumed  # type: ignore[operator]


def test_no_run_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert main(["plan", "--from", str(tmp_path / "other.json")]) == 2
    assert "is not a run" in capsys.readouterr().err
