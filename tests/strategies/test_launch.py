"""Launches by multiprocessing, in a process of their own: fork, spawn. Others are in `tests/launch`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.job import Job
from tests.strategies import launched

pytestmark = pytest.mark.runs("commopt", "launch by {launch}", launch=("fork", "notebook", "spawn"))

SCRIPT = str(Path(launched.__file__))
LIMIT = 200.0
"""Seconds until a launch is killed with all its processes."""

LAUNCHES = ("fork", "notebook", "spawn", "fork-nodes")


def run(command: list[str], folder: Path) -> str:
    """Output of a command that must end well, and with all its processes."""
    job = Job([word.format(folder=folder) for word in command], folder, LIMIT)
    code, left = job.finish()
    assert (code, left) == (0, []), job.output()
    return job.output()


def reports(folder: Path, launch: str) -> list[dict[str, Any]]:
    """What each rank left."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{launch}.*.json"))]


@pytest.mark.timeout(LIMIT + 60)
def test_launches_of_multiprocessing(tmp_path: Path) -> None:
    output = run([sys.executable, SCRIPT, "{folder}", *LAUNCHES], tmp_path)
    for launch in LAUNCHES:
        _, ranks = launched.LAUNCHES[launch]
        found = reports(tmp_path, launch)
        assert len(found) == ranks, output
        for report in found:
            assert report["parameters"] == found[0]["parameters"]
            assert report["hook_calls"] == 2 * 32 // 4 // ranks
            assert report["as_promised"]
            assert report["world"] == ranks
            expected = {"spawn": "PowerSGD(exact_below=1024, rank=2", "notebook": "block=256"}
            assert expected.get(launch, "block=128") in report["compression"]
    assert output.count("is in force on") == len(LAUNCHES)
    assert "inside 2 nodes of 2 ranks" in reports(tmp_path, "fork-nodes")[0]["explain"]
