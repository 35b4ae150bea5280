"""Each command of `docs/launch.md`, word by word: ranks find each other, nodes are right, bits are the same."""

import json
import random
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commopt import CommOptStrategy
from tests.launch import model
from tests.launch.documented import blocks
from tests.launch.job import Job, free_port
from tests.pool import WorkerPool, trainer

pytestmark = pytest.mark.runs(
    "commopt", "launch by {name}", name=("lightning", "torchrun", "torchrun-nodes", "slurm", "mpirun", "ray")
)

HERE = Path(__file__).parent
LIMIT_S = 200.0
"""Seconds until a launch is killed with all its processes."""
AT_ONCE = 2


@dataclass(frozen=True)
class Command:
    """What is expected of a block of the page.

    Args:
        title: Of the block.
        environment: Class by which Lightning knows the launcher.
        nodes: Number of nodes.
        ranks: Ranks on each.
        told: What `explain()` says of the nodes; empty where it says nothing, since there is one.
    """

    title: str
    environment: str
    nodes: int = 1
    ranks: int = 2
    told: str = ""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks


COMMANDS = {
    "lightning": Command("lightning", "LightningEnvironment"),
    "torchrun": Command("torchrun", "TorchElasticEnvironment"),
    "torchrun-nodes": Command(
        "torchrun on each of two nodes",
        "TorchElasticEnvironment",
        *(2, 2),
        "hierarchical: full precision inside 2 nodes of 2 ranks",
    ),
    "slurm": Command("job.sh", "SLURMEnvironment", 2, 1, "flat since each node has one rank"),
    "mpirun": Command("mpirun", "MPIEnvironment"),
    "ray": Command("train_ray.py", "RayLightningEnvironment"),
}


@dataclass
class Outcome:
    """What a launch left: exit codes, processes that had to be killed, and reports by fit and rank."""

    folder: Path
    codes: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    output: str = ""

    def reports(self, fit: int = 0) -> list[dict[str, Any]]:
        """By rank."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"fit{fit}.rank*.json"))]


def job_id() -> int:
    """An id of a SLURM job from which Lightning makes a port that nobody uses."""
    for last_digits in random.sample(range(10000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", 15000 + last_digits)):
            return 10000 + last_digits
    raise OSError("no port is free")


def of_job(script: str) -> dict[str, str]:
    """The variables that SLURM gives to a job on this machine."""
    options = dict(re.findall(r"^#SBATCH --(\S+?)=(\S+)$", script, re.MULTILINE))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    return {
        "SLURM_JOB_ID": str(job_id()),
        "SLURM_JOB_NAME": "job.sh",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_NODELIST": "127.0.0.1",
    }


def start(command: Command, folder: Path) -> list[Job]:
    """What users would type, in a folder with their files."""
    page = blocks()
    for name in ("train.py", "train_ray.py"):
        (folder / name).write_text(page[name])
    shutil.copy(model.__file__, folder)
    shutil.copy(HERE / "ray_driver.py", folder)
    common = {"COMMOPT_TEST_FOLDER": str(folder)}
    text, each = page[command.title], [common]
    if "torchrun on" in command.title:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        each = [common | where | {"NODE_RANK": str(node)} for node in range(command.nodes)]
    elif command.title == "job.sh":
        each = [common | of_job(text)]
    elif command.title == "train_ray.py":
        short = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of its sockets must be short
        each = [common | {"COMMOPT_TEST_RAY": short, "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}]
        text = "python ray_driver.py"
    return [Job(["bash", "-c", text], folder, LIMIT_S, variables, [HERE / "standins"]) for variables in each]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """All launches that are asked for, a few at a time, since each of them often waits."""
    wanted = {item.callspec.params["name"] for item in request.session.items if item.parent is request.node}
    waiting = [name for name in COMMANDS if name in wanted]
    running: dict[str, list[Job]] = {}
    found: dict[str, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                folder = tmp_path_factory.mktemp(waiting[0])
                running[waiting[0]] = start(COMMANDS[waiting[0]], folder)
                found[waiting[0]] = Outcome(folder)
                del waiting[0]
            for name, jobs in list(running.items()):
                if all(job.over for job in jobs):
                    for job in running.pop(name):
                        code, left = job.finish()
                        found[name].codes.append(code)
                        found[name].left += left
                        shutil.rmtree(job.variables.get("COMMOPT_TEST_RAY", ""), ignore_errors=True)
                    found[name].output = jobs[0].output()
            time.sleep(0.05)
        yield found
    finally:
        for jobs in running.values():
            for job in jobs:
                job.kill()


def fit(folder: Path, compression: str, hierarchy: Any) -> None:
    """The same training in workers of the pool."""
    model.FOLDER = folder
    strategy = CommOptStrategy(compression, hierarchy=hierarchy)
    made = model.Model()
    trainer(dist.get_world_size(), strategy, max_epochs=model.EPOCHS).fit(made, model.data())


def without_launcher(pool: WorkerPool, folder: Path, world: int, compression: str, hierarchy: Any) -> dict[str, Any]:
    """Report of the same training in the pool."""
    folder.mkdir(exist_ok=True)
    pool.run(fit, world, folder, compression, hierarchy)
    return Outcome(folder).reports()[0]


@pytest.mark.timeout(len(COMMANDS) * LIMIT_S)
@pytest.mark.parametrize("name", COMMANDS)
def test_command(pool: WorkerPool, outcomes: dict[str, Outcome], tmp_path: Path, name: str) -> None:
    command, outcome = COMMANDS[name], outcomes[name]
    assert not any(outcome.codes), outcome.output
    assert outcome.left == [], outcome.output
    ranks = outcome.reports()
    assert len(ranks) == command.world, outcome.output
    hierarchy = command.ranks if command.nodes > 1 and command.ranks > 1 else False
    expected = without_launcher(pool, tmp_path, command.world, "int8", hierarchy)
    for report in ranks:
        assert report["launcher"] == command.environment
        assert report["parameters"] == expected["parameters"]
        assert report["hook_calls"] == report["steps"] == model.EPOCHS * model.SAMPLES // model.BATCH // command.world
        assert report["promised"] == report["sent"] == expected["sent"] > 0
        assert report["world"] == command.world
        assert command.told in report["explain"]
        assert bool(command.told) == ("flat since" in report["explain"] or "nodes of" in report["explain"])
        assert report["node_ranks"] == (command.ranks if name == "mpirun" else None)
    if name == "ray":
        check_ray(outcome, without_launcher(pool, tmp_path / "dense", 2, "none", "auto"))


def check_ray(outcome: Outcome, dense: dict[str, Any]) -> None:
    """Further fits in the same workers, with `auto` and under DeepSpeed; what the callback reported."""
    automatic = outcome.reports(fit=1)
    assert len(automatic) == 2
    for report in automatic:
        assert "auto: " in report["explain"]
        assert report["parameters"] == automatic[0]["parameters"]
        assert report["promised"] == report["sent"] > 0
        if "method `none` is in force" in report["explain"]:
            assert report["parameters"] == dense["parameters"]
    zero = outcome.reports(fit=2)
    assert len(zero) == 2
    for report in zero:
        assert "DeepSpeed ZeRO stage 2 on 2 ranks; method `Int8" in report["explain"]
        assert report["promised"] == report["sent"] > 0
        assert report["parameters"] == zero[0]["parameters"]
        assert report["some"] == pytest.approx(dense["some"], rel=0.02, abs=1e-3)
    paths = sorted((outcome.folder / "ray_results").glob("*/checkpoint_*/checkpoint.ckpt"))
    assert len(paths) == 2 * model.EPOCHS, outcome.output
    checkpoint = torch.load(paths[1], weights_only=True)
    assert checkpoint["global_step"] == automatic[0]["steps"]
    assert {path.name for path in paths[1].parent.iterdir()} >= {paths[1].name, *checkpoint["commopt"]["files"]}
    assert len(checkpoint["commopt"]["files"]) == 2
    assert str(paths[-1].parent) in outcome.output
