"""A short test of the links between ranks."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

__all__ = ["LinkSpeed", "fastest", "probe"]

_LATENCIES, _REPEATS = 15, 3
_FIRST_BYTES, _LAST_BYTES = 1 << 16, 1 << 26
_LONG_S = 0.05  # a message that takes so long tells the rate


@dataclass(frozen=True)
class LinkSpeed:
    """What an all-reduce between some ranks takes.

    Args:
        latency_ms: For one number.
        mb_per_s: Megabytes (1e6 bytes) a second that each rank sends, of ``2 (n - 1) / n`` times the message.

    """

    latency_ms: float
    mb_per_s: float

    def __str__(self) -> str:
        return f"{self.latency_ms:.2g} ms, {self.mb_per_s:.3g} MB/s"


def probe(group: dist.ProcessGroup, device: torch.device, seconds: float) -> LinkSpeed:
    """Time all-reduces of growing size. A collective of the group.

    Args:
        group: The ranks.
        device: Where messages are.
        seconds: Limit; kept but for the message that exceeds it.

    """
    deadline = time.perf_counter() + seconds
    for _ in range(2):
        _took(group, device, 4)
    latency = median(_took(group, device, 4) for _ in range(_LATENCIES))
    nbytes, durations = _FIRST_BYTES, [_took(group, device, _FIRST_BYTES)]
    while not _any(group, device, nbytes >= _LAST_BYTES or durations[0] > _LONG_S or _over(deadline, 8 * durations[0])):
        nbytes *= 4
        durations = [_took(group, device, nbytes)]
    while not _any(group, device, len(durations) > _REPEATS or _over(deadline, durations[0])):
        durations.append(_took(group, device, nbytes))
    world = dist.get_world_size(group)
    took = max(median(durations[1:] or durations) - latency, 1e-9)
    return LinkSpeed(latency * 1e3, 2 * (world - 1) / world * nbytes / took / 1e6)


def fastest(speeds: Iterable[LinkSpeed | None]) -> LinkSpeed:
    """Return the speed with the highest rate."""
    return max((speed for speed in speeds if speed is not None), key=lambda speed: speed.mb_per_s)


def _over(deadline: float, next_s: float) -> bool:
    """Whether something that takes so long would end too late."""
    return time.perf_counter() + next_s > deadline


def _took(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> float:
    """Return the seconds of one all-reduce."""
    message = torch.zeros(nbytes // 4, device=device)
    _wait(device)
    start = time.perf_counter()
    dist.all_reduce(message, group=group)
    _wait(device)
    return time.perf_counter() - start


def _any(group: dist.ProcessGroup, device: torch.device, mine: bool) -> bool:
    """Let all ranks of a group decide alike."""
    flag = torch.tensor([float(mine)], device=device)
    dist.all_reduce(flag, group=group)
    return bool(flag.item())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
