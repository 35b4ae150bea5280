"""``commopt plan`` as a person types it."""

import json
import re

import pytest

from lightning_commopt.cli import main

pytest.importorskip("jsonargparse")

SMALL = ["plan", "--params", "30M", "--gpus", "4", "--gpus-per-node", "2", "--inter", "10Gbit", "--seq", "128"]

SAID = {
    "--accelerator": "gpu",
    "--gpus-per-node": "2",
    "--gpu-memory": "40GB",
    "--gpu-memory-bandwidth": "1TB/s",
    "--tflops": "100",
    "--mfu": "0.5",
    "--intra": "100GB/s",
    "--intra-latency-us": "4",
    "--layers": "8",
    "--hidden": "512",
    "--heads": "8",
    "--seq": "128",
    "--vocab": "1000",
    "--batch-per-gpu": "4",
    "--precision": "bf16-mixed",
    "--optimizer": "sgd",
    "--attention": "flash",
}


def test_it_ranks_and_gives_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "data 4" in out
    assert "CommOptStrategy(" in out
    assert "not validated: GPUs and NCCL" in out
    assert "data parallel comes first" in out


def test_json_has_every_row_with_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["feasible"]
    assert data["best"][0]["kind"] == "data"
    assert "L.Trainer(" in data["best"][0]["code"]
    for row in data["rows"]:
        parts = dict(row["memory_bytes"])
        assert sum(value for name, value in parts.items() if name != "total") == pytest.approx(parts["total"])
        assert row["not_validated"]
        assert 0 < row["scaling_efficiency"] <= 1
        assert 0 <= row["comm_ratio"] < 1


def test_a_straggler_is_told_from_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--straggler", "1.5", "--json"])
    row = json.loads(capsys.readouterr().out)["rows"][0]
    main([*SMALL, "--json"])
    even = json.loads(capsys.readouterr().out)["rows"][0]
    assert even["waiting_ms"] == 0
    assert row["waiting_ms"] > 0
    assert row["step_ms"] > even["step_ms"]


def test_what_nobody_said_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    assumed = {one["option"]: one["words"] for one in json.loads(capsys.readouterr().out)["assumed"]}
    assert assumed["--gpu-memory"] == "80 GB of memory a device"
    assert assumed["--vocab"] == "an output layer of 50257"
    assert assumed["--tflops"] == "312 TFLOPS a device"
    assert "--seq" not in assumed
    assert "--gpus-per-node" not in assumed
    assert main(SMALL) == 0
    assert "Assumed, since nothing says otherwise: GPUs (`--accelerator`);" in capsys.readouterr().out
    words = [f"{option}={value}" for option, value in SAID.items()]
    assert main(["plan", "--params", "30M", "--gpus", "2", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == []


def test_nothing_fits_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--params",
        "1.3e9",
        "--gpus",
        "2",
        "--gpu-memory",
        "16GB",
        "--seq",
        "8192",
        "--batch-per-gpu",
        "1",
    ]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    assert "devices with" in out
    assert "--checkpointing" in out
    assert "4 devices" in out or "8 devices" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "4"], "`--params` and `--gpus` are missing, such as"),
        (["--params", "1e9", "--gpus", "4", "--gpu-memory", "40Gbit"], "`40Gbit` is not a size: .* such as 40GB"),
        (["--params", "1e9", "--gpus", "4", "--inter", "25GB"], "`25GB` is not a rate: .* such as 25Gbit"),
        (["--params", "1e9", "--gpus", "16", "--gpus-per-node", "8"], "`--inter` is missing: .*such as 25Gbit"),
        (["--params", "1e9", "--gpus", "12", "--gpus-per-node", "8", "--inter", "1Gbit"], "do not fill nodes of `8`"),
        (["--params", "1e9", "--gpus", "4", "--mfu", "40"], "`--mfu=40.0` must be above 0 and at most 1"),
        (["--params", "1e9", "--gpus", "4", "--tflops", "0"], "`--tflops` must be a number of at least"),
        (
            ["--params", "1e9", "--gpus", "4", "--inter", "-1Gbit"],
            "`--inter` has no value. One that begins with `-` is",
        ),
        (["--params", "1e9", "--gpus", "4", "--gpu-memory", "0GB"], "`--gpu-memory` must be a number of at least 1 MB"),
        (["--params", "1e9", "--gpus", "4", "--inter-latency-us=-1"], "`--inter-latency-us` must be at least 0"),
        (["--params", "1e400", "--gpus", "4"], "`1e400` is not a count"),
        (["--params", "1e9", "--gpus", "4", "--layers", "0"], "`--layers=0` must be at least 1"),
        (["--params", "1e9", "--gpus", "4", "--vocab=-5"], "`--vocab=-5` must be at least 0"),
        (["--params", "1e9", "--gpus", "4", "--compute-ms", "0"], "`--compute-ms=0.0` must be above 0"),
        (["--params", "1e9", "--gpus", "4", "--batch-per-gpu", "0"], "`--batch-per-gpu=0` must be at least 1"),
        (["--params", "1e9", "--gpus", "4", "--gpus-per-node", "0"], "`--gpus-per-node=0` must be at least 1"),
        (["--params", "1e9", "--gpus", "four"], "`--gpus`: Expected an int. Got value: four"),
        (["--params", "1e9", "--gpus", "4", "--allow", "int8"], "`--allow int8` is no method of class C: choose from"),
        (["--params", "1e9", "--gpus", "4", "--allow", ","], "`--allow ,` names nothing: write words with commas"),
        (["--params", "1e9", "--gpus", "4", "--top=-1"], "`--top=-1` must be at least 0"),
        (
            ["--params", "1e9", "--gpus", "4", "--optimizer", "lion"],
            "`--optimizer`: Expected one of 'adamw', 'sgd'. Got value: lion",
        ),
        (["--params", "1e9", "--gpus", "4", "--batch-per-gpu", "1", "--global-batch", "4"], "give one"),
        (["--params", "1e9", "--gpus", "4", "--precision", "fp16"], "precision.*bf16-mixed"),
    ],
)
def test_wrong_usage_says_what_to_write(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert re.search(text, captured.err), captured.err
