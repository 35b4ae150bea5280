"""One rank on a slow link that becomes a fast one: trains under `auto`, and writes down what was decided."""

import json
import os

import torch.distributed as dist

from benchmarks.links.modes import Automatic
from benchmarks.links.rank import Task, begin, digest, leave
from benchmarks.links.record import Run
from benchmarks.links.workload import batch
from lightning_commopt.demo.network import change_rate
from lightning_commopt.tuning import AutoPolicy, Tuner

FAST = "4gbit"


def train(mode: Automatic, task: Task, rank: int) -> Tuner:
    """Train until the change was noticed, or for all steps."""
    changed = False
    for step in range(task.steps):
        mode.backward(mode.forward(*batch(step, rank)))
        mode.step()
        assert mode.tuner is not None
        if mode.tuner.verified_ms is not None and not changed:
            changed = True
            dist.barrier()
            if rank == 0:
                change_rate(int(os.environ["LINKS_LAUNCHER"]), task.ranks, FAST)
            dist.barrier()
        if changed and "moved" in mode.tuner.state.decisions[-1].reason:
            break
    assert mode.tuner is not None
    return mode.tuner


def main() -> None:
    """Train, and write what every rank decided."""
    task = begin()
    dist.init_process_group("gloo", timeout=task.timeout)
    rank = dist.get_rank()
    mode = Automatic(AutoPolicy(check_every=8))
    tuner = train(mode, task, rank)
    mine = ([decision.to_dict() for decision in tuner.state.decisions], digest(mode.module))
    everyone: list[tuple[list[dict[str, object]], str] | None] = [None] * task.ranks
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        Run(task.ranks, task.rate, 0, machine={"ranks": json.dumps(everyone)}).write(task.out_path)
    mode.close()
    leave()


if __name__ == "__main__":
    main()
