"""Watches over the ranks of one run, so that they end together, and with one message."""

import os
import select
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_commopt.failure.beats import Beats, store_of_group
from lightning_commopt.failure.board import Board, Cell
from lightning_commopt.failure.errors import is_echo, is_transport_error
from lightning_commopt.failure.phase import Activity, Phase
from lightning_commopt.failure.processes import Process, activity, main_stack, node_identity
from lightning_commopt.failure.stall import Progress, awaited
from lightning_commopt.failure.verdict import RankFailure, Verdict, raised
from lightning_commopt.routes import ControlGroup

__all__ = ["Limits", "Watch"]


@dataclass(frozen=True)
class Limits:
    """How long is waited, in beats of the rank that waits: while it is stopped itself, nothing counts.

    Args:
        beat_s: Seconds a beat.
        stopped: Until a process that SIGSTOP holds is ended.
        silent: Until a rank on another node that sends no heartbeat is given up; six times as long where it does not
            train, since much of set-up runs with the interpreter held.
        look: Until it is looked at what a main thread that does not move on does.
        warn: Until an awaited rank is named.
        grace: After a verdict, until the named rank is ended if it has not ended itself.
        stuck: After a verdict, until a process whose main thread cannot be woken ends itself.

    """

    beat_s: float = 0.5
    stopped: int = 10
    silent: int = 36
    look: int = 4
    warn: int = 120
    grace: int = 6
    stuck: int = 20


_ANSWER_S = 2.0  # of the store
_ROOT_CAUSE_S = 3.0  # how long a broken connection waits to hear why it broke
_HOLD_S = 3.0  # how long a rank that fails stays for the message to be out
_END_WAIT_S = 15.0
_FAILED, _STUCK = 17, 18  # exit codes


@dataclass
class _Peer:
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


class Watch:
    """Two threads: one looks at the processes of this node and never waits for anybody, one talks to other nodes.

    Making one is a collective. On one node there is no second thread, and the store is not used.

    Args:
        control: Agreement between ranks.
        stall_s: Seconds that a rank may hold up training while it lives.
        limits: Other limits.
        on_verdict: Is called when it is known that a rank failed, on any thread.

    """

    def __init__(
        self,
        control: ControlGroup,
        stall_s: float,
        limits: Limits,
        on_verdict: Callable[[], None],
    ) -> None:
        self.rank, self.world, self.limits = control.rank, control.world, limits
        self.verdict: Verdict | None = None
        self._on_verdict = on_verdict
        self._stall = max(2, round(stall_s / limits.beat_s))
        self._main = threading.get_ident()
        self._board, self._peers, run = _meet(control)
        self._row = self._board.rows[self.rank]
        self._serial = self._last_serial = self._still = self._since = 0
        self._trips_seen = self._store_still = 0
        self._failing = self._stopping = self._warned = False
        self._message: str | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._beats: Beats | None = None
        if any(peer.process is None for peer in self._peers.values()):
            self._beats = Beats(
                dist.PrefixStore(f"lightning_commopt/{run}", store_of_group()),
                self.rank,
                self.world,
                period_s=limits.beat_s,
                own=lambda: list(self._row),
                wanted=self._wanted,
                heard=self._heard,
            )
        self._thread = threading.Thread(target=self._run, name="lightning_commopt watch", daemon=True)
        self._thread.start()

    # ---- on the main thread ---------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Write down where this rank is."""
        row = self._row
        self._serial += 1
        row[Cell.PHASE] = phase
        row[Cell.SERIAL] = self._serial

    def begin_batch(self, step: int) -> None:
        """Write down that a batch begins, unless a rank has failed."""
        self.check()
        row = self._row
        row[Cell.STEP] = step
        row[Cell.BATCH] += 1
        self.enter(Phase.TRAINING_STEP)
        if row[Cell.BATCH] == 1 and self._beats is not None:
            self._beats.send()  # other nodes allow much more time to set-up

    @property
    def failing(self) -> bool:
        """Whether this rank is on its way out, so that no collective may be begun any more."""
        return self._failing

    def check(self) -> None:
        """Raise what another rank's failure means for this one.

        Raises:
            RankFailure: A rank failed, and this one has not noticed yet.

        """
        if self.verdict is not None and not self._failing:
            raise RankFailure(self.message())

    def failed(self, error: BaseException) -> BaseException:
        """Tell everybody of an error of this rank, and return what to raise: the error itself, unless it is an echo.

        It returns when the others know, or cannot be waited for.
        """
        if self._stopping:  # a hook after teardown
            return error
        self._failing = True
        self._row[Cell.FAILING] = 1
        if is_transport_error(error):
            self._known.wait(_ROOT_CAUSE_S)
            if self._beats is not None:
                self._wait(lambda: self.verdict is not None or self._silent_peer() is not None, _ROOT_CAUSE_S)
            if self.verdict is None:
                self._post(self._blame(error))
        elif self.verdict is None:
            cause = "got SIGTERM" if isinstance(error, SIGTERMException) else raised(error)
            rank = next((r for r, row in enumerate(self._board.rows) if row[Cell.TERMINATED]), self.rank)
            rank = rank if isinstance(error, SIGTERMException) else self.rank
            self._post(self._verdict_on(rank, cause))
        self._hold()
        return RankFailure(self.message()) if is_echo(error) else error

    def message(self) -> str:
        """Return the one message; empty while there is none."""
        if self._message is not None:
            return self._message
        if self.verdict is None:
            return ""
        return self.verdict.text(self._board.stack() or "" if self.verdict.hangs else "")

    def terminate(self) -> None:
        """Note that SIGTERM came to this rank."""
        self._row[Cell.TERMINATED] = 1

    def stop(self) -> None:
        """Say goodbye and end all threads. After a failure, wait until every rank of the node knows of it."""
        if self._stopping:
            return
        self._row[Cell.BYE] = 1
        if self.verdict is not None:
            self._wait(self._all_know, _END_WAIT_S)
            for rank, peer in self._peers.items():
                if peer.process is not None and not self._knows(rank):
                    peer.process.kill()
        self._stopping = True
        self._wake()
        self._thread.join(5)
        if self._beats is not None:
            self._beats.close(5)
        if self._thread.is_alive() or (self._beats is not None and self._beats.alive):
            return  # what it uses stays open
        for peer in self._peers.values():
            if peer.process is not None:
                peer.process.close()
        self._message = self.message()
        self._board.close()
        self._row = self._board.rows[self.rank]
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _hold(self) -> None:
        """Stay until the others know: the end of a process can be the end of all, and of a message not yet printed."""
        started = time.monotonic()
        limit_s = _HOLD_S + self.limits.grace * self.limits.beat_s  # a message waits that long for a stack
        self._wait(lambda: self._all_know() and self._row[Cell.KNOWS] == 1, limit_s)
        if self._beats is not None and (left := 4 * self.limits.beat_s - (time.monotonic() - started)) > 0:
            time.sleep(left)

    def _all_know(self) -> bool:
        return all(self._knows(rank) for rank, peer in self._peers.items() if peer.process is not None)

    def _knows(self, rank: int) -> bool:
        row = self._board.rows[rank]
        return not self._peers[rank].alive or bool(row[Cell.KNOWS] or row[Cell.BYE])

    @staticmethod
    def _wait(condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _blame(self, error: BaseException) -> Verdict:
        """Return a verdict when a collective failed and no rank has said why."""
        if (silent := self._silent_peer()) is not None:
            return self._verdict_on(silent, "is silent, and the connection to it was lost")
        failing = {rank for rank, row in ((r, self._row_of(r)) for r in self._peers) if row and row[Cell.FAILING]}
        progress = {rank: p for rank, p in self._progress().items() if rank not in failing}  # those are victims too
        progress[self.rank] = replace(progress[self.rank], activity=Activity.WAITING)  # it was, until now
        if (found := awaited(progress, self.rank, 0)) is not None:
            hangs = not progress[found[0]].done
            return self._verdict_on(found[0], f"{found[1]}, and the connection was lost", hangs)
        if self._beats is not None and self._beats.lost is not None and self.rank != 0:
            return self._store_lost(self._beats)
        return self._verdict_on(self.rank, f"lost its connection to another rank: {raised(error)}")

    def _silent_peer(self) -> int | None:
        """Return the rank on another node whose heartbeat has ended, once that can be told from a late one."""
        if self._beats is None or self._beats.lost is not None:
            return None
        rows = {rank: self._row_of(rank) for rank, peer in self._peers.items() if peer.process is None}
        silent = {rank: self._peers[rank].silent for rank, row in rows.items() if row and not row[Cell.BYE]}
        longest = max(silent, key=lambda rank: silent[rank], default=None)
        if longest is None or silent[longest] - self._store_still < self.limits.look:
            return None
        return longest

    # ---- verdicts -------------------------------------------------------------------------------------------------

    def _verdict_on(self, rank: int, cause: str, hangs: bool = False) -> Verdict:
        row = self._row_of(rank) or list(self._row)
        return Verdict(rank, Phase(row[Cell.PHASE]), row[Cell.STEP], cause, hangs)

    def _store_lost(self, beats: Beats) -> Verdict:
        cause = f"or the agent that started it, hosts the store and does not answer ({beats.lost or 'no error'})"
        return self._verdict_on(0, cause)

    def _post(self, verdict: Verdict) -> None:
        """Propose a verdict; the first one holds everywhere."""
        if self._beats is not None:
            verdict = self._beats.post(verdict, _ANSWER_S) or verdict
        self._adopt(self._board.post(verdict))

    def _heard(self, verdict: Verdict, stack: str | None) -> None:
        """Take what the store tells."""
        if self._stopping:
            return
        if self.verdict is None:
            self._adopt(self._board.post(verdict))
        if stack is not None and self._board.stack() is None:
            self._board.post_stack(stack)

    def _adopt(self, verdict: Verdict) -> None:
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        self._on_verdict()
        self._known.set()
        self._wake()

    # ---- the thread of this node ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        processes = {peer.process.fd: rank for rank, peer in self._peers.items() if peer.process is not None}
        for fd in processes:
            poll.register(fd, select.POLLIN)
        next_beat = time.monotonic() + self.limits.beat_s
        while not self._stopping:
            wait_s = max(0.0, next_beat - time.monotonic())
            for fd, _ in poll.poll(wait_s * 1000):
                if fd == self._wake_read:
                    os.read(fd, 1000)
                else:
                    poll.unregister(fd)
                    self._ended(processes[fd])
            if self._stopping:
                return
            beats = time.monotonic() >= next_beat
            if beats:
                next_beat = time.monotonic() + self.limits.beat_s
                self._beat()
            if self.verdict is not None:
                self._since += beats
                self._after_verdict(self.verdict)

    def _ended(self, rank: int) -> None:
        """A process of this node has ended."""
        peer = self._peers[rank]
        peer.alive = False
        assert peer.process is not None
        if self._look_for_verdict() or self._board.rows[rank][Cell.BYE]:
            return
        cause = f"ended without a word (pid {peer.process.pid} was killed, ran out of memory, or called os._exit)"
        self._post(self._verdict_on(rank, cause))

    def _beat(self) -> None:
        row = self._row
        row[Cell.BEAT] += 1
        serial = row[Cell.SERIAL]
        self._still = self._still + 1 if serial == self._last_serial else 0
        self._last_serial = serial
        row[Cell.ACTIVITY] = activity(self._main) if self._still >= self.limits.look else Activity.RUNNING
        for rank, peer in self._peers.items():
            self._observe(rank, peer)
        if not self._look_for_verdict():
            self._look_for_failures()

    def _look_for_verdict(self) -> bool:
        if self.verdict is None and (verdict := self._board.verdict()) is not None:
            self._adopt(verdict)
        return self.verdict is not None

    def _row_of(self, rank: int) -> Sequence[int] | None:
        """What a rank wrote down, if it is known."""
        if rank == self.rank or self._peers[rank].process is not None:
            return self._board.rows[rank]
        assert self._beats is not None
        return self._beats.rows.get(rank)

    def _observe(self, rank: int, peer: _Peer) -> None:
        """Count own beats in which a rank did not change."""
        if (row := self._row_of(rank)) is None:
            return
        peer.still = peer.still + 1 if row[Cell.SERIAL] == peer.serial else 0
        peer.silent = peer.silent + 1 if row[Cell.BEAT] == peer.beat else 0
        peer.serial, peer.beat = row[Cell.SERIAL], row[Cell.BEAT]
        if peer.process is not None and peer.alive:
            peer.stopped = peer.stopped + 1 if peer.process.stopped() else 0

    def _look_for_failures(self) -> None:
        """See who is stopped, silent, or holds up the others."""
        for rank, peer in self._peers.items():
            if peer.process is not None and peer.stopped >= self.limits.stopped:
                cause = f"was stopped (SIGSTOP, pid {peer.process.pid}) and had to be killed"
                self._post(self._verdict_on(rank, cause))
                return
        if self._beats is not None and self._look_at_other_nodes(self._beats):
            return
        if self._still >= min(self._stall, self.limits.warn):
            self._look_for_stall()

    def _look_at_other_nodes(self, beats: Beats) -> bool:
        """See whether the next node lives, and the host of the store."""
        following = (self.rank + 1) % self.world
        peer, row = self._peers[following], self._row_of(following)
        lived = row is not None and not row[Cell.BYE]
        self._store_still = self._store_still + 1 if beats.trips == self._trips_seen else 0
        self._trips_seen = beats.trips
        if self.rank != 0 and self._store_is_gone(beats):
            self._post(self._store_lost(beats))
        elif peer.process is None and lived and peer.silent - self._store_still >= self._silence(following):
            seconds = peer.silent * self.limits.beat_s
            cause = f"was last heard of {seconds:.0f} s ago (it was stopped, or its node or network is down)"
            self._post(self._verdict_on(following, cause))
        return self.verdict is not None

    def _silence(self, rank: int) -> int:
        """Beats without a heartbeat until a rank is given up."""
        row = self._row_of(rank)
        return self.limits.silent * (1 if row is not None and Phase(row[Cell.PHASE]).trains else 6)

    def _store_is_gone(self, beats: Beats) -> bool:
        """Whether the host of the store is needed, and is not there. It may be the first to end after a good run."""
        if beats.lost is None:
            return self._store_still >= self.limits.silent
        if (row := self._row_of(0)) is not None and row[Cell.BYE]:
            return False
        if self._row[Cell.ACTIVITY] == Activity.WAITING:
            return self._still >= self.limits.stopped
        return self._still >= self.limits.silent and Phase(self._row[Cell.PHASE]).trains

    def _look_for_stall(self) -> None:
        progress = self._progress()
        if (found := awaited(progress, self.rank, self._stall)) is not None:
            rank, cause = found
            seconds = self._stall * self.limits.beat_s
            self._post(self._verdict_on(rank, f"{cause}, and others waited for it for {seconds:.0f} s", hangs=True))
        elif not self._warned and (found := awaited(progress, self.rank, self.limits.warn)) is not None:
            self._warned = True
            row = self._row_of(found[0])
            if row is not None and self._is_first(found[0]):
                where = Phase(row[Cell.PHASE]).words(row[Cell.STEP])
                seconds = self.limits.warn * self.limits.beat_s
                _print(f"rank {found[0]}, {where}, {found[1]}; others have waited for it for {seconds:.0f} s.")

    def _progress(self) -> dict[int, Progress]:
        """What is known of every rank."""
        known = {}
        for rank in range(self.world):
            if (row := self._row_of(rank)) is None:
                continue
            peer = self._peers.get(rank)
            silent = peer is not None and peer.silent >= self.limits.stopped
            known[rank] = Progress(
                row[Cell.BATCH],
                Phase(row[Cell.PHASE]),
                row[Cell.STEP],
                Activity.RUNNING if silent else Activity(row[Cell.ACTIVITY]),
                self._still if peer is None else peer.still,
                bool(row[Cell.BYE]),
            )
        return known

    def _wanted(self) -> Sequence[int]:
        """Rows of other nodes that are needed: the next rank's, and everybody's once this rank waits or fails."""
        everybody = self._failing or self._still >= self.limits.look or self.verdict is not None
        ranks = range(self.world) if everybody else {0, (self.rank + 1) % self.world}
        return [rank for rank in ranks if rank != self.rank and self._peers[rank].process is None]

    # ---- after a verdict ------------------------------------------------------------------------------------------

    def _after_verdict(self, verdict: Verdict) -> None:
        if verdict.rank == self.rank and not self._failing:
            self._end_named(verdict)
        if not self._row[Cell.KNOWS] and self._settled(verdict):
            if self._is_first(verdict.rank):
                _print(self.message())
            self._row[Cell.KNOWS] = 1
        named = self._peers.get(verdict.rank)
        if named is not None and named.process is not None and named.alive and self._must_end(verdict, named):
            named.process.kill()
        if self._since >= self.limits.stuck and self._cannot_be_woken():
            _print(f"[rank {self.rank}] is ended; its main thread was here:\n{main_stack(self._main)}")
            os._exit(_STUCK)

    def _settled(self, verdict: Verdict) -> bool:
        """Whether the message is complete."""
        return not verdict.hangs or self._board.stack() is not None or self._since > self.limits.grace

    def _is_first(self, but: int = -1) -> bool:
        """Whether this is the lowest living rank of its node, apart from one."""
        alive = {rank for rank, peer in self._peers.items() if peer.process is not None and peer.alive}
        alive = {rank for rank in alive if not self._board.rows[rank][Cell.BYE]} | {self.rank}
        return self.rank == min(alive - {but} or alive)

    def _must_end(self, verdict: Verdict, named: _Peer) -> bool:
        """Whether the named rank is to be killed: it was stopped, or did not end itself."""
        row = self._board.rows[verdict.rank]
        if row[Cell.FAILING] or row[Cell.BYE]:
            return False
        return named.stopped > 0 or self._since >= self.limits.grace

    def _end_named(self, verdict: Verdict) -> None:
        """This rank is the one: leave the stack, and go."""
        if verdict.hangs:
            stack = main_stack(self._main)
            self._board.post_stack(stack)
            if self._beats is not None:
                self._beats.post_stack(stack, _ANSWER_S)
        os._exit(_FAILED)

    def _cannot_be_woken(self) -> bool:
        """Whether the main thread waits for what will not come; not while a rank writes its last checkpoint."""
        if self._failing:
            return activity(self._main) == Activity.WAITING
        return not any(
            peer.alive and self._board.rows[rank][Cell.FAILING] and not self._board.rows[rank][Cell.BYE]
            for rank, peer in self._peers.items()
            if peer.process is not None
        )

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")


def _meet(control: ControlGroup) -> tuple[Board, dict[int, _Peer], str]:
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
    peers = {rank: _Peer(processes.get(rank)) for rank in range(control.world) if rank != control.rank}
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


def _print(text: str) -> None:
    print(f"\ncommopt: {text}", file=sys.stderr, flush=True)
