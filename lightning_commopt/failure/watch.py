"""Watches over the ranks of one run, so that they end together, and with one message."""

import time
from collections.abc import Callable
from dataclasses import replace

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_commopt.failure.board import Cell
from lightning_commopt.failure.errors import is_echo, is_transport_error
from lightning_commopt.failure.node_watch import Limits, NodeWatch
from lightning_commopt.failure.phase import Activity, Phase
from lightning_commopt.failure.stall import awaited
from lightning_commopt.failure.verdict import RankFailure, Verdict, raised

__all__ = ["Limits", "Watch"]

_ROOT_CAUSE_S = 3.0  # how long a broken connection waits to hear why it broke
_HOLD_S = 3.0  # how long a rank that fails stays for the message to be out
_END_WAIT_S = 15.0


class Watch:
    """What the main thread tells and asks; the threads of an :class:`NodeWatch` do the rest.

    Args:
        node: These threads.

    """

    def __init__(self, node: NodeWatch) -> None:
        self._serial = 0
        self._node = node

    def enter(self, phase: Phase) -> None:
        """Write down where this rank is."""
        row = self._node.row
        self._serial += 1
        row[Cell.PHASE] = phase
        row[Cell.SERIAL] = self._serial

    def begin_batch(self, step: int) -> None:
        """Write down that a batch begins, unless a rank has failed."""
        self.check()
        row = self._node.row
        row[Cell.STEP] = step
        row[Cell.BATCH] += 1
        self.enter(Phase.TRAINING_STEP)
        if row[Cell.BATCH] == 1 and self._node.beats is not None:
            self._node.beats.send()  # other nodes allow much more time to set-up

    @property
    def knows_of_a_failure(self) -> bool:
        """Whether this rank has failed, or knows of another one that has."""
        return self._node.failing or self._node.verdict is not None

    @property
    def failing(self) -> bool:
        """Whether this rank is on its way out, so that no collective may be begun any more."""
        return self._node.failing

    def check(self) -> None:
        """Raise what another rank's failure means for this one.

        Raises:
            RankFailure: A rank failed, and this one has not noticed yet.

        """
        if self._node.verdict is not None and not self._node.failing:
            raise RankFailure(self.message())

    def failed(self, error: BaseException) -> BaseException:
        """Tell everybody of an error of this rank, and return what to raise: the error itself, unless it is an echo.

        It returns when the others know, or cannot be waited for.
        """
        if self._node.stopping:  # a hook after teardown
            return error
        self._node.failing = True
        self._node.row[Cell.FAILING] = 1
        if is_transport_error(error):
            self._node.known.wait(_ROOT_CAUSE_S)
            if self._node.beats is not None:
                self._wait(
                    lambda: self._node.verdict is not None or self._node.silent_peer() is not None, _ROOT_CAUSE_S
                )
            if self._node.verdict is None:
                self._node.post(self._blame(error))
        elif self._node.verdict is None:
            cause = "got SIGTERM" if isinstance(error, SIGTERMException) else raised(error)
            rank = next((r for r, row in enumerate(self._node.board.rows) if row[Cell.TERMINATED]), self._node.rank)
            rank = rank if isinstance(error, SIGTERMException) else self._node.rank
            self._node.post(self._node.verdict_on(rank, cause))
        self._hold()
        return RankFailure(self.message()) if is_echo(error) else error

    def message(self) -> str:
        """Return the one message; empty while there is none."""
        return self._node.message()

    def terminate(self) -> None:
        """Note that SIGTERM came to this rank."""
        self._node.row[Cell.TERMINATED] = 1

    def stop(self) -> None:
        """Say goodbye and end all threads. After a failure, wait until every rank of the node knows of it."""
        if self._node.stopping:
            return
        self._node.row[Cell.BYE] = 1
        if self._node.verdict is not None:
            self._wait(self._all_know, _END_WAIT_S)
            for rank, peer in self._node.peers.items():
                if peer.process is not None and not self._knows(rank):
                    peer.process.kill()
        self._node.close()

    def _hold(self) -> None:
        """Stay until the others know: the end of a process can be the end of all, and of a message not yet printed."""
        started = time.monotonic()
        limits = self._node.limits
        limit_s = _HOLD_S + limits.grace * limits.beat_s  # a message waits that long for a stack
        self._wait(lambda: self._all_know() and self._node.row[Cell.KNOWS] == 1, limit_s)
        if self._node.beats is not None and (left := 4 * limits.beat_s - (time.monotonic() - started)) > 0:
            time.sleep(left)

    def _all_know(self) -> bool:
        return all(self._knows(rank) for rank, peer in self._node.peers.items() if peer.process is not None)

    def _knows(self, rank: int) -> bool:
        row = self._node.board.rows[rank]
        return not self._node.peers[rank].alive or bool(row[Cell.KNOWS] or row[Cell.BYE])

    @staticmethod
    def _wait(condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _blame(self, error: BaseException) -> Verdict:
        """Return a verdict when a collective failed and no rank has said why."""
        if (silent := self._node.silent_peer()) is not None:
            return self._node.verdict_on(silent, "is silent, and the connection to it was lost")
        rows = {rank: self._node.row_of(rank) for rank in self._node.peers}
        victims = {rank for rank, row in rows.items() if row and row[Cell.FAILING]}
        progress = {rank: p for rank, p in self._node.progress().items() if rank not in victims}
        progress[self._node.rank] = replace(progress[self._node.rank], activity=Activity.WAITING)  # it was, until now
        if (found := awaited(progress, self._node.rank, 0)) is not None:
            hangs = not progress[found[0]].done
            return self._node.verdict_on(found[0], f"{found[1]}, and the connection was lost", hangs)
        if self._node.beats is not None and self._node.beats.lost is not None and self._node.rank != 0:
            return self._node.store_lost(self._node.beats)
        return self._node.verdict_on(self._node.rank, f"lost its connection to another rank: {raised(error)}")
