"""``commopt probe``."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, Table
from lightning_commopt.cli.ranks import joined_ranks
from lightning_commopt.cli.units import byte_size, count, show_bytes, show_count, show_rate
from lightning_commopt.routes import ControlGroup
from lightning_commopt.strategies.groups import make_groups
from lightning_commopt.tuning import Channel, Link, Ways
from lightning_commopt.tuning.outlook import MOST_PARAMETERS, Outlook, evidence_for, outlook
from lightning_commopt.tuning.sweep import Speed, sweep

__all__ = ["probe"]

_MOST_BYTES = 1e11


@dataclass(frozen=True)
class _Place:
    """Where messages travelled: between which ranks, and how fast."""

    name: str
    ranks: int
    speeds: list[Speed]


def probe(
    processes: int = 2,
    smallest: str = "4KiB",
    largest: str = "16MiB",
    params: str | None = None,
    step_ms: float | None = None,
) -> Answer | None:
    """How fast are the links between my processes, and is my model too large for them?

    Times all-reduce, all-gather, reduce-scatter and sending to a neighbour with messages of growing size: algbw is size
    over time, busbw what a link carries for it in one direction, as nccl-tests name them. Where several nodes have
    several ranks each, inside a node and between nodes too (all ranks of a node at once). Then says what
    strategy="commopt" makes of the links, and, with --params, which method it would choose.

        commopt probe --params 350M
        torchrun --nproc-per-node 8 -m lightning_commopt.cli probe --params 1.3e9 --step-ms 400
        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29400 -m lightning_commopt.cli probe

    On GPUs (nccl) where a node has one for each of its processes, else on the CPU (gloo). Under torchrun its processes
    are the ranks; otherwise the command starts some on this machine.

    Args:
        processes: Processes to start where torchrun did not.
        smallest: Size of the smallest message: a number and B, kB, MB, GB, KiB, MiB or GiB.
        largest: Size of the largest one. An operation ends earlier where a message takes a second.
        params: Trainable parameters of a model in fp32, such as 350M or 1.3e9: which method would be chosen for it?
        step_ms: How long the model computes in an optimizer step, without communication, ms. Left out: all answers that
            there are, by how long it computes.

    """
    sizes = _sizes(byte_size(smallest), byte_size(largest))
    numel = 0 if params is None else count(params)
    if params is not None and not 1 <= numel <= MOST_PARAMETERS:
        raise UsageError(f"`--params {params}` must be at least 1 and at most {MOST_PARAMETERS:.0e}.")
    if step_ms is not None and (step_ms <= 0 or not numel):
        raise UsageError("`--step-ms` is a positive number of ms, and needs `--params`.")
    words = ["probe", f"--smallest={smallest}", f"--largest={largest}"]
    words += [f"--params={params}"] * (params is not None) + [f"--step-ms={step_ms}"] * (step_ms is not None)
    with joined_ranks(processes, words) as device:
        places, link, found = _measured(device, sizes, numel, step_ms)
        rank, backend = dist.get_rank(), dist.get_backend()
    return _answer(places, link, found, numel, f"{backend}, {device.type}") if rank == 0 else None


def _sizes(smallest: float, largest: float) -> list[int]:
    """Return sizes that grow by four, with both ends."""
    if not 4 <= smallest <= largest:
        raise UsageError("`--smallest` must be at least 4 B, and `--largest` not below it.")
    if largest > _MOST_BYTES:
        raise UsageError(
            f"`--largest` must be at most {show_bytes(_MOST_BYTES)}: every rank holds several such messages."
        )
    sizes = [int(smallest)]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return [*sizes, int(largest)]  # what comes to the same message is sent once


def _measured(
    device: torch.device, sizes: list[int], numel: int, step_ms: float | None
) -> tuple[list[_Place], Link, list[Outlook]]:
    """Measure with all ranks together."""
    control = ControlGroup()
    groups = make_groups(control, device, "auto", None)
    world = dist.group.WORLD
    assert world is not None
    places = [_Place("all ranks", control.world, sweep(control, world, device, sizes))]
    if groups.node is not None:
        nodes, local = groups.topology.nodes, groups.topology.ranks_per_node
        inside = [list(range(node * local, (node + 1) * local)) for node in range(nodes)]
        between = [list(range(place, nodes * local, local)) for place in range(local)]
        for name, parts, group in (
            ("inside a node", inside, groups.node),
            ("between nodes", between, groups.gradients),
        ):
            part = ControlGroup(parts=parts)
            control.barrier()
            places.append(_Place(name, part.world, sweep(part, group, device, sizes)))
    link, evidence = evidence_for(numel, control, Ways(world, groups.gradients, groups.node), device)
    return places, link, [] if evidence is None else outlook(evidence, step_ms)


def _answer(places: list[_Place], link: Link, found: list[Outlook], numel: int, where: str) -> Answer:
    shown: list[Table | str] = [_table(place, where) for place in places]
    shown.append(_link_table(link))
    if found:
        shown += [f'A model of {show_count(numel)} parameters (fp32) under strategy="commopt":', *map(_sentence, found)]
    return Answer({"backend": where, "places": places, "link": link, "parameters": numel, "auto": found}, shown)


def _table(place: _Place, where: str) -> Table:
    columns = ["operation", "size", "time, us", "algbw, MB/s", "busbw, MB/s", "busbw"]
    rows = [
        [
            speed.operation.replace("_", "-"),
            _binary(speed.nbytes),
            f"{speed.us:.4g}",
            f"{speed.algbw_gb_per_s * 1e3:.4g}",
            f"{speed.busbw_gb_per_s * 1e3:.4g}",
            show_rate(speed.busbw_gb_per_s * 1e9),
        ]
        for speed in place.speeds
    ]
    return Table(f"{place.name}: {place.ranks} ranks ({where})", columns, rows)


def _link_table(link: Link) -> Table:
    """Lay out the links as ``auto`` sees them."""
    where = "between nodes" if link.inside is not None else "between ranks"
    channels: list[tuple[str, Channel | None]] = [
        ("DDP's all-reduce, all ranks", link.reducer),
        (f"encoded gradients, {where}", link.route),
        ("inside a node", link.inside),
    ]
    rows = [
        [name, show_rate(channel.bytes_per_second), f"{channel.latency_ms:.3g}", f"{channel.stolen_ns_per_byte:.2g}"]
        for name, channel in channels
        if channel is not None
    ]
    columns = ["what travels", "rate a rank", "latency, ms", "computing delayed, ns a byte"]
    return Table('The links as strategy="commopt" sees them', columns, rows)


def _sentence(found: Outlook) -> str:
    computes = (
        f"{found.from_ms:.3g} ms a step" if found.to_ms is None else f"{found.from_ms:.3g} to {found.to_ms:.3g} ms"
    )
    what = "DDP's own reducer, since there is nothing to win"
    if found.method != "none":
        what = f"{found.method}, predicted {found.dense_ms / found.step_ms:.1f}x"
    return f"  where it computes {computes}: {what} (DDP {found.dense_ms:.4g} ms, chosen {found.step_ms:.4g} ms)"


def _binary(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return show_bytes(nbytes) if nbytes >= 1000 and nbytes % 10 == 0 else f"{nbytes} B"
