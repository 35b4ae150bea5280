"""Check 8: what ranks talk through, and how fast."""

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.host import has_infiniband, interface_to_others, shared_memory_bytes
from lightning_commopt.callbacks.doctor.nccl_log import log_lines, transports, variables
from lightning_commopt.callbacks.doctor.probe import LinkSpeed, fastest, probe
from lightning_commopt.routes.topology import node_name
from lightning_commopt.strategies.nccl import same_on_all_ranks

__all__ = ["EnvironmentCheck", "RankFacts", "facts_of_rank", "problems"]

_SMALL_SHM = 1 << 30
_SLOWER = 3.0
_SWITCHED_OFF = {"NCCL_P2P_DISABLE": "GPUs of a node", "NCCL_SHM_DISABLE": "GPUs of a node", "NCCL_IB_DISABLE": "nodes"}


@dataclass(frozen=True)
class RankFacts:
    """Where one rank runs.

    Args:
        node: What tells nodes apart.
        backend: Of the default process group.
        interface: Network interface to other ranks.
        variables: Of NCCL and gloo.
        transports: That NCCL chose, by channels; None where its log is not in a file.
        shared_memory: Bytes of ``/dev/shm``; None without one.
        workers: Whether data loaders have worker processes.
        infiniband: Whether the node has such a device.

    """

    node: str
    backend: str
    interface: str
    variables: Mapping[str, str]
    transports: Mapping[str, int] | None
    shared_memory: int | None
    workers: bool
    infiniband: bool


def facts_of_rank(backend: str, workers: bool) -> RankFacts:
    """Return where this process runs.

    Args:
        backend: Of the process group that it has, or would have.
        workers: Whether data loaders have worker processes.

    """
    lines = log_lines(os.environ)
    return RankFacts(
        node=node_name(),
        backend=backend,
        interface=interface_to_others(os.environ, backend),
        variables=variables(os.environ),
        transports=None if lines is None else transports(lines),
        shared_memory=shared_memory_bytes(),
        workers=workers,
        infiniband=has_infiniband(),
    )


class EnvironmentCheck(Check):
    """Backend, interface, NCCL's variables and transports, shared memory, nodes, and a short test of the links."""

    name = "environment"

    @override
    def findings(self) -> list[Finding]:
        if self.run.world == 1:
            return [self.unchecked("one process: there is nobody to talk to.")]
        ranks = self.run.all_gather(self._facts())
        found = [self.found(*what, rank=rank, number=number) for what, rank, number in problems(ranks)]
        speeds = self._links([facts.node for facts in ranks])
        found += list(self._slow_links(speeds))
        return [*found, *self._summary(ranks, speeds)]

    def _facts(self) -> RankFacts:
        loaders = CombinedLoader(self.run.trainer.train_dataloader).flattened
        return facts_of_rank(dist.get_backend(), any(getattr(loader, "num_workers", 0) > 0 for loader in loaders))

    def _links(self, nodes: Sequence[str]) -> dict[str, dict[int, LinkSpeed]]:
        """Return the speed of each group of ranks, by its first rank: inside nodes and between them."""
        members = {node: [r for r, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
        seconds = self.run.options.probe_seconds / 2
        inside = [ranks for ranks in members.values() if len(ranks) > 1]
        between = [[ranks[0] for ranks in members.values()]] if len(members) > 1 else []
        speeds = {}
        for where, groups in (("inside a node", inside), ("between nodes", between)):
            if groups and seconds:
                by_rank = self.run.all_gather(self._speed(groups, seconds))
                speeds[where] = {ranks[0]: fastest(by_rank[r] for r in ranks) for ranks in groups}  # the rest waited
        return speeds

    def _speed(self, groups: Sequence[Sequence[int]], seconds: float) -> LinkSpeed | None:
        """Measure this rank's group; every rank makes all of them."""
        mine, own, made = None, None, []
        for ranks in groups:
            if len(ranks) == self.run.world:
                own = dist.group.WORLD
            elif len(ranks) > 1:
                made.append(dist.new_group(list(ranks)))
                own = made[-1] if self.run.rank in ranks else own
        if own is not None:
            mine = probe(own, self.run.trainer.strategy.root_device, seconds)
        for group in made:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        return mine

    def _slow_links(self, speeds: Mapping[str, Mapping[int, LinkSpeed]]) -> Iterator[Finding]:
        for where, by_first in speeds.items():
            slow = min(by_first, key=lambda rank: by_first[rank].mb_per_s)
            rate, best = by_first[slow].mb_per_s, max(speed.mb_per_s for speed in by_first.values())
            if best > _SLOWER * rate:
                yield self.found(
                    f"links {where}: the node of rank {slow} has {rate:.3g} MB/s, another {best:.3g}",
                    "compare the load of that node, its cards, and how they are connected (`nvidia-smi topo -m`)",
                    rank=slow,
                    number=rate,
                )

    def _summary(self, ranks: Sequence[RankFacts], speeds: Mapping[str, Mapping[int, LinkSpeed]]) -> Iterator[Finding]:
        first = ranks[0]
        sizes = Counter(facts.node for facts in ranks).values()
        names = ", ".join(f"{name}={value}" for name, value in first.variables.items()) or "no NCCL_ or GLOO_ variable"
        shm = "none" if first.shared_memory is None else f"{first.shared_memory / 1e6:.0f} MB"
        where = f"{len(sizes)} node{'s' * (len(sizes) > 1)} with {'/'.join(map(str, sorted(set(sizes))))} ranks"
        yield self.fine(f"{first.backend} on {where}; interface {first.interface}; {names}; shared memory {shm}")
        for where, by_first in speeds.items():
            slowest = min(by_first.values(), key=lambda speed: speed.mb_per_s)
            yield self.fine(f"links {where}: {slowest} a rank in an all-reduce", number=slowest.mb_per_s)
        if first.backend == "nccl":
            yield self._transports(ranks)

    def _transports(self, ranks: Sequence[RankFacts]) -> Finding:
        chosen: Counter[str] = Counter()
        for facts in ranks:
            chosen.update(facts.transports or {})
        if chosen:
            return self.fine("NCCL chose " + ", ".join(f"{n} channels {name}" for name, n in chosen.most_common()))
        return self.unchecked(
            "NCCL's log is not in a file, so its transport is not known",
            "set `NCCL_DEBUG=INFO` and `NCCL_DEBUG_FILE=/tmp/nccl.%h.%p` and run again",
        )


def problems(ranks: Sequence[RankFacts]) -> Iterator[tuple[tuple[str, str], int, float | None]]:
    """Yield what is wrong with where ranks run: message and remedy, rank, number."""
    several_nodes = len({facts.node for facts in ranks}) > 1
    shared = [same_on_all_ranks(facts.variables) for facts in ranks]
    for rank, facts in enumerate(ranks):
        for name in sorted(shared[0].keys() | shared[rank].keys()):
            mine, theirs = shared[rank].get(name, "not set"), shared[0].get(name, "not set")
            if mine != theirs:
                text = f"`{name}` is {mine} on rank {rank}, and {theirs} on rank 0"
                yield (text, "set it alike on all nodes, or use `CommOptStrategy(nccl={...})`"), rank, None
        if several_nodes and (facts.interface == "lo" or facts.interface.startswith("127.")):
            text = f"rank {rank} talks to other nodes through the interface `{facts.interface}`, which leads to none"
            remedy = "set `GLOO_SOCKET_IFNAME` (gloo) or `NCCL_SOCKET_IFNAME` (NCCL) to the network card, as `ip addr`"
            yield (text, f"{remedy} calls it"), rank, None
        nccl = facts.backend == "nccl"
        if facts.shared_memory is not None and facts.shared_memory < _SMALL_SHM and (facts.workers or nccl):
            text = f"rank {rank} has {facts.shared_memory / 1e6:.0f} MB of shared memory; workers and NCCL need more"
            yield (text, "start the container with `--shm-size=8g` or `--ipc=host`"), rank, facts.shared_memory / 1e6
        yield from (((text, remedy), rank, None) for text, remedy in _slow_transport(facts, several_nodes) if nccl)


def _slow_transport(facts: RankFacts, several_nodes: bool) -> Iterator[tuple[str, str]]:
    host = socket.gethostname() if facts.node == node_name() else facts.node
    for name, who in _SWITCHED_OFF.items():
        matters = several_nodes and facts.infiniband if name == "NCCL_IB_DISABLE" else True
        if facts.variables.get(name) == "1" and matters:
            yield f"`{name}=1` makes {who} talk the slow way", "remove it, unless it works around a known fault"
    if facts.infiniband and "NET/Socket" in (facts.transports or {}):
        yield (
            f"NCCL talks through TCP sockets (NET/Socket) although node `{host}` has InfiniBand or RoCE",
            "look for `NET/IB` lines in NCCL's log: a missing libibverbs, `NCCL_IB_DISABLE`, or a container without "
            "`/dev/infiniband`",
        )
