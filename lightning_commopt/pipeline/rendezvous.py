"""Proof that lists of point-to-point operations cannot deadlock."""

from collections.abc import Sequence

from lightning_commopt.pipeline.actions import Action
from lightning_commopt.pipeline.messages import Message, incoming, outgoing
from lightning_commopt.pipeline.transfers import Operation, Receive, Send

__all__ = ["DeadlockError", "check_rendezvous"]


class DeadlockError(ValueError):
    """Ranks would wait for each other for ever, or receive what is not sent."""


def check_rendezvous(placement: Sequence[int], operations: Sequence[Sequence[Operation]]) -> None:
    """Run the lists with blocking operations until all are done.

    A send ends when its rank and the receiver, each with all earlier operations done, are at the two ends of the same
    message. It is the strictest way in which a backend may work: gloo buffers sends, NCCL runs operations in order for
    a pair of ranks or a communicator, and both let a rank go on after it has started one. What finishes here finishes
    there.

    Args:
        placement: The rank of each stage.
        operations: The list of each rank.

    Raises:
        DeadlockError: No rank can go on; the error names the operation that each rank is at. Or an action lacks a
            message, two ranks are at different messages of the same direction, or a message that was made stays behind.

    """
    _Run(placement, operations).finish()


class _Run:
    def __init__(self, placement: Sequence[int], operations: Sequence[Sequence[Operation]]) -> None:
        self._placement = placement
        self._operations = operations
        self._at = [0] * len(operations)
        self._there: set[tuple[int, Message]] = set()

    def finish(self) -> None:
        ranks = range(len(self._operations))
        while any(self._advance(rank) for rank in ranks):
            pass
        if waiting := [f"rank {rank} at {_words(self._next(rank))}" for rank in ranks if self._next(rank) is not None]:
            raise DeadlockError(f"No rank can go on: {'; '.join(waiting)}.")

    def _next(self, rank: int) -> Operation | None:
        at = self._at[rank]
        return self._operations[rank][at] if at < len(self._operations[rank]) else None

    def _advance(self, rank: int) -> bool:
        """Do the next operation of a rank: an action, or a send that its peer is about to receive."""
        operation = self._next(rank)
        if isinstance(operation, Action):
            self._compute(rank, operation)
        elif isinstance(operation, Send):
            if not self._deliver(rank, operation):
                return False
        else:
            return False
        self._at[rank] += 1
        return True

    def _compute(self, rank: int, action: Action) -> None:
        if self._placement[action.stage] != rank:
            raise DeadlockError(f"Rank {rank} computes `{action}` of a stage on rank {self._placement[action.stage]}.")
        stages = len(self._placement)
        if (needed := incoming(action, stages)) and (rank, needed) not in self._there:
            raise DeadlockError(f"Rank {rank} computes `{action}` before it has {needed}.")
        if made := outgoing(action, stages):
            self._there.add((rank, made))

    def _deliver(self, rank: int, send: Send) -> bool:
        if (rank, send.message) not in self._there:
            raise DeadlockError(f"Rank {rank} sends {send.message} before it was made.")
        other = self._next(send.peer)
        if not isinstance(other, Receive) or other.peer != rank:
            return False
        if other.message != send.message:
            raise DeadlockError(f"Rank {send.peer} receives {other.message} where rank {rank} sends {send.message}.")
        self._there.add((send.peer, send.message))
        self._at[send.peer] += 1
        return True


def _words(operation: Operation | None) -> str:
    if isinstance(operation, Send):
        return f"the send of {operation.message} to rank {operation.peer}"
    if isinstance(operation, Receive):
        return f"the receive of {operation.message} from rank {operation.peer}"
    return f"`{operation}`"
