"""Which ranks share a node."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from lightning_commopt.routes.control import ControlGroup

__all__ = ["Hierarchy", "Topology", "discover", "node_name"]

Hierarchy = Literal["auto", False] | int


@dataclass(frozen=True)
class Topology:
    """Nodes as this rank sees them.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Ranks in each.
        reason: Why the exchange is flat; empty where it is hierarchical.

    """

    nodes: int
    ranks_per_node: int
    reason: str

    @property
    def hierarchical(self) -> bool:
        """Whether gradients are first reduced inside nodes."""
        return not self.reason

    def groups(self, backend: str, timeout: object) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Make all groups, on all ranks in the same order.

        Returns:
            The group of this rank's node, and that of the ranks with its place on the other nodes.

        """
        rank, size = dist.get_rank(), self.ranks_per_node
        inside = between = None
        for node in range(self.nodes):
            members = list(range(node * size, (node + 1) * size))
            group = dist.new_group(members, timeout=timeout, backend=backend)
            inside = group if rank in members else inside
        for place in range(size):
            members = list(range(place, self.nodes * size, size))
            group = dist.new_group(members, timeout=timeout, backend=backend)
            between = group if rank in members else between
        assert inside is not None
        assert between is not None
        return inside, between


def discover(hierarchy: Hierarchy, control: ControlGroup) -> Topology:
    """Find out which ranks share a node. A collective.

    Args:
        hierarchy: ``"auto"``: hierarchical where several equal nodes have several ranks each. False: flat. A number:
            that many consecutive ranks make a node, wherever they run.
        control: Compares where ranks run.

    Raises:
        ValueError: ``hierarchy`` is a number that does not divide the world size.

    """
    world = control.world
    if hierarchy is False:
        return Topology(1, world, "`hierarchy=False`")
    if hierarchy != "auto":
        if world % hierarchy:
            raise ValueError(f"`hierarchy={hierarchy}` must divide the number of ranks, which is {world}.")
        return _shaped(world // hierarchy, hierarchy)
    names = control.all_gather(node_name())
    sizes = Counter(names)
    if len(set(sizes.values())) > 1:
        return Topology(len(sizes), 0, f"nodes are uneven ({', '.join(map(str, sizes.values()))} ranks)")
    size = world // len(sizes)
    if any(len(set(names[first : first + size])) > 1 for first in range(0, world, size)):
        return Topology(len(sizes), size, "ranks of a node are not consecutive")
    return _shaped(len(sizes), size)


def _shaped(nodes: int, size: int) -> Topology:
    reason = "there is one node" if nodes == 1 else "each node has one rank" if size == 1 else ""
    return Topology(nodes, size, reason)


def node_name() -> str:
    """Return the number that the launcher gives this node, if it does, with host name and boot id."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return f"{_number_of_node(os.environ)} {host}"


def _number_of_node(environment: Mapping[str, str]) -> str:
    """Return it as torchrun, Ray Train or SLURM tell; empty for `mpirun` and others, where the host name decides."""
    if "LOCAL_WORLD_SIZE" in environment:  # of torchrun or Ray, and not of a Lightning that starts processes itself
        return environment.get("GROUP_RANK", environment.get("NODE_RANK", ""))
    return environment.get("SLURM_NODEID", "")
