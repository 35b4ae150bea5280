"""Joining the process group again after ``torchrun`` has restarted the workers."""

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import _init_dist_connection
from torch.distributed import PrefixStore, TCPStore, is_initialized

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy
    from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = ["join_restarted", "restart_count"]


def restart_count() -> int:
    """Return how often ``torchrun`` has restarted its workers while its store stayed; 0 in every other case."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return 0  # rank 0 hosts a store of its own, a new one with every process
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_restarted(strategy: "CommOptStrategy | CommOptShardedStrategy") -> None:
    """Make the default process group of a restarted attempt, under keys of its own; no effect in a first attempt.

    The store of torchrun's agent outlives an attempt, and torch 2.13 gives every attempt the same keys, so that ranks
    would read the addresses of dead ones. Lightning leaves alone a process group that it finds.

    Args:
        strategy: About to set up its process group.

    """
    attempt = restart_count()
    if attempt == 0 or is_initialized():
        return
    strategy.set_world_ranks()
    environment, timeout = strategy.cluster_environment, strategy._timeout
    assert environment is not None
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    agent = TCPStore(environment.main_address, environment.main_port, environment.world_size(), False, **limit)
    _init_dist_connection(
        environment,
        strategy._get_process_group_backend(),
        store=PrefixStore(f"commopt/attempt{attempt}", agent),
        timeout=timeout,
        device_id=None if strategy.root_device.type == "cpu" else strategy.root_device,
    )
