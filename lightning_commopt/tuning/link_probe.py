"""How fast the links are: about a second of messages, with the operations that a step will use."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lightning_commopt.routes import ControlGroup
from lightning_commopt.routes.transport import Transport, transport_for
from lightning_commopt.tuning.beside import Computing
from lightning_commopt.tuning.links import Channel, Link

__all__ = ["probe_link", "wait_for_device"]

_FIRST_BYTES, _LAST_BYTES = 1 << 16, 1 << 24
_LONG_S = 0.03  # a message that takes this long is long enough to tell the rate
_PINGS, _REPEATS = 12, 3
_BESIDE_S = 0.05


@dataclass(frozen=True)
class _Way:
    """One kind of operation.

    Args:
        run: Carries out one with a message of so many bytes.
        sent: Bytes that a rank sends for it.
        hops: Messages one after the other in it.

    """

    run: Callable[[int], None]
    sent: Callable[[int], float]
    hops: int


def probe_link(
    control: ControlGroup,
    device: torch.device,
    reducer: dist.ProcessGroup,
    route: dist.ProcessGroup,
    inside: dist.ProcessGroup | None = None,
) -> Link:
    """Measure the links. A collective; returns the same on all ranks.

    A message's duration is the shortest on any rank: what another took longer, it waited.

    Args:
        control: Compares times.
        device: Where gradients are.
        reducer: Group of DDP's own reducer.
        route: Group in which encoded gradients travel.
        inside: Ranks of this node, where the exchange is hierarchical.

    """
    peers = dist.get_world_size(route)
    control.barrier()
    by_reducer = _measured(control, _all_reduce(reducer, device))
    way = _messages(route, device)
    by_route = _measured(control, way)
    within = None if inside is None else _measured(control, _messages(inside, device))
    stolen = 0.0 if device.type != "cpu" else _stolen_ns(control, way, by_route)
    channels = [_with_stolen(channel, stolen) for channel in (by_reducer, by_route)]
    return Link(
        world=control.world,
        reducer=channels[0],
        route=channels[1],
        ranks_per_node=control.world // peers if inside is not None else 1,
        inside=None if within is None else _with_stolen(within, stolen),
    )


def _with_stolen(channel: Channel, stolen: float) -> Channel:
    return Channel(channel.bytes_per_second, channel.latency_ms, stolen)


def _all_reduce(group: dist.ProcessGroup, device: torch.device) -> _Way:
    """DDP's own operation."""
    world = dist.get_world_size(group)

    def run(nbytes: int) -> None:
        dist.all_reduce(torch.zeros(max(1, nbytes // 4), device=device), group=group)
        wait_for_device(device)

    return _Way(run, lambda nbytes: 2 * (world - 1) / world * nbytes, 2 * (world - 1))


def _messages(group: dist.ProcessGroup, device: torch.device) -> _Way:
    """Our own: to everybody at once."""
    transport: Transport = transport_for(group, device)
    world = transport.world

    def run(nbytes: int) -> None:
        send = torch.zeros(world, max(1, nbytes // max(1, world - 1)), dtype=torch.uint8, device=device)
        transport.all_to_all(send, torch.empty_like(send)).wait()
        wait_for_device(device)

    return _Way(run, float, 1)


def wait_for_device(device: torch.device) -> None:
    """Wait until what was issued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(control: ControlGroup, way: _Way) -> Channel:
    """Return latency and rate of a kind of operation."""
    for _ in range(2):
        way.run(4)
    latency_s = median(_durations(control, way, 4, _PINGS))
    nbytes = _FIRST_BYTES
    (took,) = _durations(control, way, nbytes, 1)
    while took < _LONG_S and nbytes < _LAST_BYTES:
        nbytes *= 4
        (took,) = _durations(control, way, nbytes, 1)
    took = median(_durations(control, way, nbytes, _REPEATS))
    seconds = max(took - latency_s, 1e-6)
    return Channel(way.sent(nbytes) / seconds, latency_s / way.hops * 1e3)


def _durations(control: ControlGroup, way: _Way, nbytes: int, times: int) -> list[float]:
    """Return the seconds of some operations without waiting: each the shortest on any rank."""
    mine = []
    for _ in range(times):
        start = time.perf_counter()
        way.run(nbytes)
        mine.append(time.perf_counter() - start)
    return [min(seconds) for seconds in zip(*control.all_gather(mine), strict=True)]


def _stolen_ns(control: ControlGroup, way: _Way, channel: Channel) -> float:
    """Return the nanoseconds of computing that a byte sent beside it costs.

    The least of some attempts, mean over ranks: what else the machine does only adds to it.
    """
    nbytes = 1 << 18
    once_s = way.sent(nbytes) / channel.bytes_per_second + channel.latency_ms * 1e-3
    count = max(1, min(400, round(_BESIDE_S / once_s)))
    computing = Computing()

    def send() -> None:
        for _ in range(count):
            way.run(nbytes)

    attempts = []
    for _ in range(_REPEATS):
        control.barrier()
        attempts.append(computing.lost_s(send) * 1e9 / (count * way.sent(nbytes)))
    everyone = control.all_gather(attempts)
    least: float = min(sum(attempt) / len(attempt) for attempt in zip(*everyone, strict=True))
    return least
