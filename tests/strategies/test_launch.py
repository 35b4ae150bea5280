"""Real launches, in processes of their own: script, fork, spawn, torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.strategies import launched

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(launched.__file__))
LIMIT = 200.0
"""Seconds until a launch is killed with all its processes."""

COMMANDS = {
    "popen": [sys.executable, SCRIPT, "{folder}", "popen"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(SCRIPT, "{folder}", "torchrun"),
    ],
    "multiprocessing": [sys.executable, SCRIPT, "{folder}", "fork", "notebook", "spawn", "spawn-nodes"],
}


def run(command: list[str], folder: Path) -> str:
    """Output of a command that must end well."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [word.format(folder=folder) for word in command]
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, output
    return output


def reports(folder: Path, launch: str) -> list[dict[str, Any]]:
    """What each rank left."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{launch}.*.json"))]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("kind", COMMANDS)
def test_launch(tmp_path: Path, kind: str) -> None:
    output = run(COMMANDS[kind], tmp_path)
    launches = COMMANDS[kind][COMMANDS[kind].index("{folder}") + 1 :]
    for launch in launches:
        _, ranks = launched.LAUNCHES[launch]
        found = reports(tmp_path, launch)
        assert len(found) == ranks, output
        for report in found:
            assert report["parameters"] == found[0]["parameters"]
            assert report["hook_calls"] == 2 * 32 // 4 // ranks
            assert report["as_promised"]
            assert report["world"] == ranks
    assert output.count("is in force on") == len(launches)
    expected = {"spawn": "PowerSGD(exact_below=1024, rank=2", "notebook": "block=256"}
    for launch in launches:
        for report in reports(tmp_path, launch):
            assert expected.get(launch, "block=128") in report["compression"]
    if "spawn-nodes" in launches:
        assert "inside 2 nodes of 2 ranks" in reports(tmp_path, "spawn-nodes")[0]["explain"]
