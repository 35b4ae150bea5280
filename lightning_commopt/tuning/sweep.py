"""How fast collectives are, by the size of their messages, in the words of nccl-tests.

Sizes, ``algbw`` and ``busbw`` are those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: the
algorithm's bandwidth is the size over the time, the bus bandwidth is what a link between neighbours carries for it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning.link_probe import wait_for_device

__all__ = ["OPERATIONS", "Speed", "sweep"]

# torch 2.13 has new names for both, and warns of the old ones.
_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOOPS = 3
_LOOP_S = 0.08  # about how long a loop takes: a message that takes longer is sent once in it
_MOST = 200  # messages in a loop
_ENOUGH_S = 1.0  # a message that takes so long is the last size


@dataclass(frozen=True)
class Speed:
    """An operation with a message of one size.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"send_receive"``.
        nbytes: Size: of the whole vector, as nccl-tests have it; of what each rank sends for ``"send_receive"``.
        us: Microseconds of one, of several back to back; mean over ranks.
        algbw_gb_per_s: Size over time, GB (1e9 bytes) a second.
        busbw_gb_per_s: What a rank's link carries in one direction, GB a second.

    """

    operation: str
    nbytes: int
    us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float


@dataclass(frozen=True)
class _Operation:
    """One kind of collective.

    Args:
        prepared: Given a group, a device and a number of elements that the ranks divide, returns what carries out one.
        bus_factor: Of algbw, given the number of ranks.

    """

    prepared: Callable[[dist.ProcessGroup, torch.device, int], Callable[[], object]]
    bus_factor: Callable[[int], float]


def _all_reduce(group: dist.ProcessGroup, device: torch.device, numel: int) -> Callable[[], object]:
    whole = torch.zeros(numel, device=device)
    return lambda: dist.all_reduce(whole, group=group)


def _all_gather(group: dist.ProcessGroup, device: torch.device, numel: int) -> Callable[[], object]:
    part, whole = torch.zeros(numel // dist.get_world_size(group), device=device), torch.zeros(numel, device=device)
    return lambda: _all_gather_into(whole, part, group=group)


def _reduce_scatter(group: dist.ProcessGroup, device: torch.device, numel: int) -> Callable[[], object]:
    part, whole = torch.zeros(numel // dist.get_world_size(group), device=device), torch.zeros(numel, device=device)
    return lambda: _reduce_scatter_into(part, whole, group=group)


def _send_receive(group: dist.ProcessGroup, device: torch.device, numel: int) -> Callable[[], object]:
    """To the next rank, and from the one before."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    following, before = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    sent, received = torch.zeros(numel, device=device), torch.zeros(numel, device=device)

    def run() -> None:
        # On gloo a message waits for its receiver: receiving first keeps both directions of a link busy.
        pair = [dist.P2POp(dist.irecv, received, before, group), dist.P2POp(dist.isend, sent, following, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return run


OPERATIONS = {
    "all_reduce": _Operation(_all_reduce, lambda world: 2 * (world - 1) / world),
    "all_gather": _Operation(_all_gather, lambda world: (world - 1) / world),
    "reduce_scatter": _Operation(_reduce_scatter, lambda world: (world - 1) / world),
    "send_receive": _Operation(_send_receive, lambda world: 1.0),
}


def sweep(control: ControlGroup, group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> list[Speed]:
    """Time every operation with messages of these sizes. A collective; returns the same on all ranks.

    A size is the last of an operation where a message takes a second.

    Args:
        control: Of the same ranks as the group.
        group: The ranks.
        device: Where messages are.
        sizes: Bytes, ascending; rounded down to what the ranks can divide, and those that are then equal taken once.

    """
    found = []
    world = control.world
    numels = dict.fromkeys(max(1, size // (4 * world)) * world for size in sizes)
    for name in OPERATIONS:
        for numel in numels:
            speed = _timed(control, group, device, name, numel)
            found.append(speed)
            if speed.us * 1e-6 >= _ENOUGH_S:
                break
    return found


def _timed(control: ControlGroup, group: dist.ProcessGroup, device: torch.device, name: str, numel: int) -> Speed:
    run = OPERATIONS[name].prepared(group, device, numel)
    control.barrier()
    once_s = _loop_s(control, run, device, 2)
    count = max(1, min(_MOST, round(_LOOP_S / max(once_s, 1e-9))))
    seconds = median(_loop_s(control, run, device, count) for _ in range(_LOOPS if once_s < _ENOUGH_S else 1))
    algbw = 4 * numel / seconds / 1e9
    return Speed(name, 4 * numel, seconds * 1e6, algbw, algbw * OPERATIONS[name].bus_factor(control.world))


def _loop_s(control: ControlGroup, run: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the seconds of one operation of several back to back, mean over ranks: the same on all of them."""
    control.barrier()
    wait_for_device(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    wait_for_device(device)
    mine = (time.perf_counter() - start) / count
    everyone = control.all_gather(mine)
    return sum(everyone) / len(everyone)
