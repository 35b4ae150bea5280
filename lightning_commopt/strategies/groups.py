"""The process groups of a run."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_commopt.routes import ControlGroup, Hierarchy, Topology, discover

__all__ = ["Groups", "make_groups"]


@dataclass(frozen=True)
class Groups:
    """Groups for gradients, made once for a default process group.

    Args:
        gradients: The ranks among which encoded gradients travel.
        node: The ranks of this node, where the exchange is hierarchical.
        topology: Which ranks share a node.

    """

    gradients: dist.ProcessGroup
    node: dist.ProcessGroup | None
    topology: Topology


def make_groups(control: ControlGroup, device: torch.device, hierarchy: Hierarchy, timeout: timedelta | None) -> Groups:
    """Make the groups for gradients; every rank calls this at the same point.

    On CUDA a flat exchange uses DDP's own group, so that SyncBatchNorm, DDP's map of used parameters and ours share one
    communicator. On the CPU it has a group of its own, since it runs in a thread of its own.

    Args:
        control: Agreement between ranks.
        device: Where gradients are.
        hierarchy: As the user chose, the same on all ranks.
        timeout: Of every group.

    """
    topology = discover(hierarchy, control)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if topology.hierarchical:
        node, between = topology.groups(backend, timeout)
        return Groups(between, node, topology)
    world = dist.group.WORLD
    gradients = world if device.type == "cuda" else dist.new_group(backend=backend, timeout=timeout)
    assert gradients is not None
    return Groups(gradients, None, topology)
