"""The benchmark on slow links: what it computes, that it runs, and that it leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.links.bound import Link, shortest_step_ms
from benchmarks.links.record import Run, Series
from benchmarks.links.report import markdown, rows
from lightning_commopt.demo.network import Network, NetworkError, bits_per_second, why_not
from lightning_commopt.tuning import ComputeProfile

ROOT = Path(__file__).parents[1]
LIMIT = 100.0
"""Seconds until a run of the benchmark is killed."""

REASON = why_not()
needs_network = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@contextmanager
def benchmark(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The benchmark in a process of its own, which is ended in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.links", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def namespaces(process: subprocess.Popen[str]) -> list[str]:
    """Those that a run of the benchmark has made and not deleted."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"links-{process.pid}-")]


def processes_in(namespace: str) -> list[int]:
    """Those that run in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in listed.split()]


def started_ranks(process: subprocess.Popen[str]) -> list[int]:
    """The process of each of two ranks, as soon as both are there."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        pids = [pid for rank in (0, 1) for pid in processes_in(f"links-{process.pid}-{rank}")]
        if len(pids) == 2:
            return pids
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.05)
    raise AssertionError("No rank was started.")


@needs_network
@pytest.mark.timeout(LIMIT + 20)
def test_smoke(tmp_path: Path) -> None:
    with benchmark("--smoke", "--results", str(tmp_path)) as process:
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, output
        assert namespaces(process) == []
    (written,) = tmp_path.glob("links-*.json")
    run = Run.read(written)
    dense, int8 = rows(run)
    assert (dense.mode, int8.mode) == ("ddp", "int8")
    assert dense.replicas_equal
    assert int8.replicas_equal
    assert 4.0 < dense.bytes_per_parameter < 4.4, "one rank of two sends every gradient once, and headers"
    assert 1.0 < int8.bytes_per_parameter < 1.1
    assert int8.overhead is not None
    assert int8.overhead == pytest.approx(1.045, abs=0.03), "headers of packets of 1,500 bytes"
    assert sum(run.series["int8"].bucket_numels) == run.parameters == 3_700_224
    assert len(run.series["int8"].bucket_numels) > 5
    fed_the_same = [series.losses[0] for series in run.series.values()]
    assert fed_the_same[0] == pytest.approx(fed_the_same[1], abs=0.02)


@needs_network
@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "a rank dies"])
def test_nothing_is_left(tmp_path: Path, end: str) -> None:
    with benchmark("--rate", "1gbit", "--modes", "ddp", "--steps", "100000", "--results", str(tmp_path)) as process:
        ranks = started_ranks(process)
        assert len(namespaces(process)) == 3
        if end == "a rank dies":
            os.kill(ranks[1], signal.SIGKILL)
        else:
            process.send_signal(signal.Signals[end])
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == {"SIGTERM": 143, "SIGINT": 130, "a rank dies": 1}[end], output
        assert namespaces(process) == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert ("Rank 1 ended with -9" in output) == (end == "a rank dies"), output
    assert not any(tmp_path.iterdir())


@needs_network
def test_a_network_takes_down_only_its_own() -> None:
    with Network(1, "1gbit") as network:
        with pytest.raises(NetworkError, match="File exists"), Network(1, "1gbit"):
            raise AssertionError("Two networks of one process have the same names.")
        assert Path(f"/run/netns/{network.namespace(0)}").exists()
    assert not Path(f"/run/netns/{network.namespace(0)}").exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else "/bin/true")
    with pytest.raises(NetworkError, match="`tc` is not installed: install iproute2"), Network(1, "1gbit"):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="needs root"), Network(1, "1gbit"):
        pass


def test_rates() -> None:
    rates = {"100mbit": 1e8, "1gbit": 1e9, "2.5gbit": 2.5e9, "512kbit": 5.12e5, "none": float("inf")}
    assert {word: bits_per_second(word) for word in rates} == rates
    for word in ("100", "1gbps", "-1gbit", "0mbit", "1gbit; true"):
        with pytest.raises(ValueError, match="is not a rate"):
            bits_per_second(word)


COMPUTE = ComputeProfile(10, 20, 5, ready=[(100, 8.0), (300, 14.0), (400, 19.0)])
SLOW = Link(bits_per_second=8e6, latency_ms=0.5)  # 1,000 bytes a millisecond


def test_the_wire_bounds_a_step_where_it_is_slow() -> None:
    # 40,000 bytes take 40 ms, two hops for each of two buckets 2 ms; the first bucket is there after 14 ms.
    assert shortest_step_ms(COMPUTE, SLOW, 40_000, [200, 200], hops=2) == pytest.approx(10 + 5 + 14 + 42)


def test_backward_bounds_a_step_where_the_wire_is_fast() -> None:
    # Of 400 bytes the last bucket's 100 take 0.1 ms and one hop; the codec shares the core with backward.
    assert shortest_step_ms(COMPUTE, SLOW, 400, [300, 100], hops=1, codec_ms=3) == pytest.approx(15 + 20 + 3 + 0.6)
    assert shortest_step_ms(COMPUTE, SLOW, 0, [], hops=0) == 35


def series(*step_ms: float, sent: float = 0.0, parts: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Series:
    """Steps of these durations, each with the same forward, backward and optimizer."""
    forward, backward, optimizer = ([part] * len(step_ms) for part in parts)
    zeros = [0.0] * len(step_ms)
    return Series(list(step_ms), forward, backward, optimizer, zeros, [sent] * len(step_ms), zeros)


def test_ratios_are_paired_step_by_step() -> None:
    floor = series(40, 50, 60, parts=(10, 30, 5))
    run = Run(2, "100mbit", 2, parameters=1000, ready=[(1000, 30.0)])
    run.series = {"nosync": floor, "ddp": series(100, 200, 600, sent=4000), "int8": series(50, 200, 200, sent=1000)}
    by_mode = {row.mode: row for row in rows(run)}
    assert by_mode["int8"].speed_up == pytest.approx((1.5, 2.0, 2.5)), "of 2, 1 and 3; medians alone give 1"
    assert by_mode["int8"].exposed_ms == 140
    assert by_mode["int8"].bytes_per_parameter == 1
    assert by_mode["nosync"].efficiency == pytest.approx(45 / 50)
    assert "| int8 | 200.0 | 50.0 | 2.00 [1.50, 2.50] |" in "\n".join(markdown([run]))


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run(4, "none", 2, ready=[(10, 1.5)], series={"ddp": series(1.25, 2.5)})
    run.write(tmp_path / "links-4xnone-1.json")
    assert Run.read(tmp_path / "links-4xnone-1.json") == run
