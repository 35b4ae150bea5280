"""How the ranks of a run get to know each other: the board of a node, and what is held of each rank."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_commopt.failure.board import Board
from lightning_commopt.failure.processes import Process, node_identity
from lightning_commopt.routes import ControlGroup

__all__ = ["Peer", "meet"]


@dataclass
class Peer:
    """What is observed of another rank, counted in own beats."""

    process: Process | None = None  # on this node
    alive: bool = True
    serial: int = -1
    still: int = 0
    beat: int = -1
    silent: int = 0
    stopped: int = 0


@dataclass(frozen=True)
class _Introduction:
    node: str
    pid: int
    fd: int
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


def meet(control: ControlGroup) -> tuple[Board, dict[int, Peer], str]:
    """Get to know the other ranks: the board of this node, what is held of each rank, and a name for the run."""
    board = Board(control.world)
    everyone = control.all_gather(_Introduction(node_identity(), os.getpid(), board.fd))
    mine = everyone[control.rank]
    here = [rank for rank, other in enumerate(everyone) if other.node == mine.node]
    shared, processes = _join(control, everyone, here)
    joined = control.all_gather(shared is not None)
    if shared is not None and all(joined[rank] for rank in here):
        board.close()
        board = shared
    else:  # then the ranks of this node see each other as those of other nodes do
        for process in processes.values():
            process.close()
        processes = {}
    peers = {rank: Peer(processes.get(rank)) for rank in range(control.world) if rank != control.rank}
    return board, peers, everyone[0].run


def _join(
    control: ControlGroup, everyone: Sequence[_Introduction], here: Sequence[int]
) -> tuple[Board | None, dict[int, Process]]:
    """Open the board of this node's first rank, and hold the processes of the others."""
    processes: dict[int, Process] = {}
    try:
        for rank in here:
            if rank != control.rank:
                processes[rank] = Process(everyone[rank].pid)
        return Board.of(control.world, everyone[here[0]].pid, everyone[here[0]].fd), processes
    except (OSError, AttributeError):
        return None, processes
