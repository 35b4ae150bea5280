"""What each rank computes, sends and receives, in one order that cannot deadlock."""

from typing import NamedTuple

from lightning_commopt.pipeline.actions import Action, Schedule
from lightning_commopt.pipeline.messages import Message, incoming, outgoing
from lightning_commopt.pipeline.simulate import StageCost, simulate

__all__ = ["Operation", "Receive", "Send", "lower"]

# A backward takes about twice its forward. Only ties in who goes first depend on it.
_TYPICAL = StageCost(forward=1.0, backward=2.0, weight=1.0)


class Send(NamedTuple):
    """Start to send a message to another rank."""

    message: Message
    peer: int


class Receive(NamedTuple):
    """Start to receive a message from another rank."""

    message: Message
    peer: int


Operation = Action | Send | Receive


def lower(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    """Add the point-to-point operations to a schedule.

    A rank runs its list in order. It starts sends and receives without waiting for their end, waits for a message
    before the action that needs it, and for all its sends at the end of the step. Stages of one rank hand over in
    memory.

    A send follows the action that makes its message. Where that cannot deadlock, a receive is started one action ahead,
    so that the message travels during that action: in 1F1B, for one of the two messages that meet each other.

    All lists follow one order of all ranks, so they would finish even if every send waited for its receive and every
    receive for its message, one operation at a time. They finish all the more where operations run in order for a pair
    of ranks or a process group (NCCL), or sends are buffered (gloo). Between two ranks, the messages of each direction
    are received in the order in which they are sent.

    Returns:
        The list of each rank.

    Raises:
        ValueError: Ranks of the schedule wait for each other in a circle.

    """
    return tuple(tuple(rank.operations) for rank in _Lowering(schedule).run())


class _Rank:
    """The growing list of one rank."""

    def __init__(self, rank: int, schedule: Schedule) -> None:
        self._stages = schedule.stages
        self._placement = schedule.placement
        self._rank = rank
        self._actions = schedule.actions[rank]
        self._done = 0
        self._received: set[Message] = set()
        self.outbox: Message | None = None
        self.operations: list[Operation] = []

    @property
    def next(self) -> Action | None:
        """What this rank computes next."""
        return self._actions[self._done] if self._done < len(self._actions) else None

    def awaited(self, ahead: int) -> Message | None:
        """Return the message that the next action lacks, or the one ``ahead`` of it."""
        if self._done + ahead >= len(self._actions):
            return None
        message = incoming(self._actions[self._done + ahead], self._stages)
        local = message is None or self._placement[message.source] == self._rank
        return None if local or message in self._received else message

    def compute(self) -> None:
        """Compute the next action; what it makes for another rank waits in the outbox."""
        action = self._actions[self._done]
        self._done += 1
        self.operations.append(action)
        made = outgoing(action, self._stages)
        if made is not None and self._placement[made.target] != self._rank:
            self.outbox = made

    def send(self) -> None:
        """Empty the outbox."""
        assert self.outbox is not None
        self.operations.append(Send(self.outbox, self._placement[self.outbox.target]))
        self.outbox = None

    def receive(self, message: Message) -> None:
        """Receive a message, needed now or later."""
        self.operations.append(Receive(message, self._placement[message.source]))
        self._received.add(message)


class _Lowering:
    """Run a schedule with blocking messages and write down what happens."""

    def __init__(self, schedule: Schedule) -> None:
        self._placement = schedule.placement
        self._starts = simulate(schedule, [_TYPICAL] * schedule.stages).starts
        self._ranks = [_Rank(rank, schedule) for rank in range(schedule.ranks)]

    def run(self) -> list[_Rank]:
        while self._step():
            pass
        return self._ranks

    def _step(self) -> bool:
        """Let one thing happen; False when all is done."""
        senders = [rank for rank in self._ranks if rank.outbox is not None]
        wanted = [rank for rank in senders if rank.outbox in self._window(rank)]
        able = sorted(filter(self._able, self._ranks), key=self._start)
        prepared = [rank for rank in able if rank.awaited(1) is None]
        if wanted:
            self._transfer(wanted[0])
        elif able:
            (prepared or able)[0].compute()
        elif senders:  # all of them wait for each other: one receives earlier than it would
            self._transfer(senders[0])
        return bool(able or senders)

    def _window(self, sender: _Rank) -> tuple[Message | None, ...]:
        """Return what the receiver of a sender's message wants to receive now."""
        assert sender.outbox is not None
        receiver = self._ranks[self._placement[sender.outbox.target]]
        return receiver.awaited(0), receiver.awaited(1)

    def _able(self, rank: _Rank) -> bool:
        return rank.next is not None and rank.outbox is None and rank.awaited(0) is None

    def _start(self, rank: _Rank) -> float:
        assert rank.next is not None
        return self._starts[rank.next]

    def _transfer(self, sender: _Rank) -> None:
        assert sender.outbox is not None
        self._ranks[self._placement[sender.outbox.target]].receive(sender.outbox)
        sender.send()
