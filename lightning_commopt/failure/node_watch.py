"""The threads of a watch: they look at processes, collect heartbeats, and come to a verdict."""

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_commopt.failure.beats import Beats, store_of_group
from lightning_commopt.failure.board import Cell
from lightning_commopt.failure.meeting import Peer, meet
from lightning_commopt.failure.phase import Activity, Phase
from lightning_commopt.failure.processes import activity, main_stack
from lightning_commopt.failure.stall import Progress, awaited
from lightning_commopt.failure.verdict import Verdict
from lightning_commopt.routes import ControlGroup

__all__ = ["Limits", "NodeWatch"]


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
_FAILED, _STUCK = 17, 18  # exit codes


class NodeWatch:
    """Two threads: one looks at the processes of this node and never waits for anybody, one talks to other nodes.

    Making one is a collective, on the main thread. On one node there is no second thread, and the store is not used.

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
        self.board, self.peers, run = meet(control)
        self.row = self.board.rows[self.rank]
        self._last_serial = self._still = self._since = 0
        self._trips_seen = self._store_still = 0
        self.failing = self.stopping = self._warned = False
        self._message: str | None = None
        self.known = threading.Event()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self.beats: Beats | None = None
        if any(peer.process is None for peer in self.peers.values()):
            self.beats = Beats(
                dist.PrefixStore(f"lightning_commopt/{run}", store_of_group()),
                self.rank,
                self.world,
                period_s=limits.beat_s,
                own=lambda: list(self.row),
                wanted=self._wanted,
                heard=self._heard,
            )
        self._thread = threading.Thread(target=self._run, name="lightning_commopt watch", daemon=True)
        self._thread.start()

    def message(self) -> str:
        """Return the one message; empty while there is none."""
        if self._message is not None:
            return self._message
        if self.verdict is None:
            return ""
        return self.verdict.text(self.board.stack() or "" if self.verdict.hangs else "")

    def close(self) -> None:
        """End all threads. What they use stays open where one does not end."""
        self.stopping = True
        self._wake()
        self._thread.join(5)
        if self.beats is not None:
            self.beats.close(5)
        if self._thread.is_alive() or (self.beats is not None and self.beats.alive):
            return
        for peer in self.peers.values():
            if peer.process is not None:
                peer.process.close()
        self._message = self.message()
        self.board.close()
        self.row = self.board.rows[self.rank]
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- verdicts ---------------------------------------------------------------------------------------------------

    def verdict_on(self, rank: int, cause: str, hangs: bool = False) -> Verdict:
        """Return a verdict on a rank where it was last seen."""
        row = self.row_of(rank) or list(self.row)
        return Verdict(rank, Phase(row[Cell.PHASE]), row[Cell.STEP], cause, hangs)

    def store_lost(self, beats: Beats) -> Verdict:
        """Return the verdict on rank 0 where the store does not answer."""
        cause = f"or the agent that started it, hosts the store and does not answer ({beats.lost or 'no error'})"
        return self.verdict_on(0, cause)

    def post(self, verdict: Verdict) -> None:
        """Propose a verdict; the first one holds everywhere."""
        if self.beats is not None:
            verdict = self.beats.post(verdict, _ANSWER_S) or verdict
        self._adopt(self.board.post(verdict))

    def _heard(self, verdict: Verdict, stack: str | None) -> None:
        """Take what the store tells."""
        if self.stopping:
            return
        if self.verdict is None:
            self._adopt(self.board.post(verdict))
        if stack is not None and self.board.stack() is None:
            self.board.post_stack(stack)

    def _adopt(self, verdict: Verdict) -> None:
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        self._on_verdict()
        self.known.set()
        self._wake()

    def silent_peer(self) -> int | None:
        """Return the rank on another node whose heartbeat has ended, once that can be told from a late one."""
        if self.beats is None or self.beats.lost is not None:
            return None
        rows = {rank: self.row_of(rank) for rank, peer in self.peers.items() if peer.process is None}
        silent = {rank: self.peers[rank].silent for rank, row in rows.items() if row and not row[Cell.BYE]}
        longest = max(silent, key=lambda rank: silent[rank], default=None)
        if longest is None or silent[longest] - self._store_still < self.limits.look:
            return None
        return longest

    # ---- the thread of this node ------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        processes = {peer.process.fd: rank for rank, peer in self.peers.items() if peer.process is not None}
        for fd in processes:
            poll.register(fd, select.POLLIN)
        next_beat = time.monotonic() + self.limits.beat_s
        while not self.stopping:
            wait_s = max(0.0, next_beat - time.monotonic())
            for fd, _ in poll.poll(wait_s * 1000):
                if fd == self._wake_read:
                    os.read(fd, 1000)
                else:
                    poll.unregister(fd)
                    self._ended(processes[fd])
            if self.stopping:
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
        peer = self.peers[rank]
        peer.alive = False
        assert peer.process is not None
        if self._look_for_verdict() or self.board.rows[rank][Cell.BYE]:
            return
        cause = f"ended without a word (pid {peer.process.pid} was killed, ran out of memory, or called os._exit)"
        self.post(self.verdict_on(rank, cause))

    def _beat(self) -> None:
        row = self.row
        row[Cell.BEAT] += 1
        serial = row[Cell.SERIAL]
        self._still = self._still + 1 if serial == self._last_serial else 0
        self._last_serial = serial
        row[Cell.ACTIVITY] = activity(self._main) if self._still >= self.limits.look else Activity.RUNNING
        for rank, peer in self.peers.items():
            self._observe(rank, peer)
        if not self._look_for_verdict():
            self._look_for_failures()

    def _look_for_verdict(self) -> bool:
        if self.verdict is None and (verdict := self.board.verdict()) is not None:
            self._adopt(verdict)
        return self.verdict is not None

    def row_of(self, rank: int) -> Sequence[int] | None:
        """What a rank wrote down, if it is known."""
        if rank == self.rank or self.peers[rank].process is not None:
            return self.board.rows[rank]
        assert self.beats is not None
        return self.beats.rows.get(rank)

    def _observe(self, rank: int, peer: Peer) -> None:
        """Count own beats in which a rank did not change."""
        if (row := self.row_of(rank)) is None:
            return
        peer.still = peer.still + 1 if row[Cell.SERIAL] == peer.serial else 0
        peer.silent = peer.silent + 1 if row[Cell.BEAT] == peer.beat else 0
        peer.serial, peer.beat = row[Cell.SERIAL], row[Cell.BEAT]
        if peer.process is not None and peer.alive:
            peer.stopped = peer.stopped + 1 if peer.process.stopped() else 0

    def _look_for_failures(self) -> None:
        """See who is stopped, silent, or holds up the others."""
        for rank, peer in self.peers.items():
            if peer.process is not None and peer.stopped >= self.limits.stopped:
                cause = f"was stopped (SIGSTOP, pid {peer.process.pid}) and had to be killed"
                self.post(self.verdict_on(rank, cause))
                return
        if self.beats is not None and self._look_at_other_nodes(self.beats):
            return
        if self._still >= min(self._stall, self.limits.warn):
            self._look_for_stall()

    def _look_at_other_nodes(self, beats: Beats) -> bool:
        """See whether the next node lives, and the host of the store."""
        following = (self.rank + 1) % self.world
        peer, row = self.peers[following], self.row_of(following)
        lived = row is not None and not row[Cell.BYE]
        self._store_still = self._store_still + 1 if beats.trips == self._trips_seen else 0
        self._trips_seen = beats.trips
        if self.rank != 0 and self._store_is_gone(beats):
            self.post(self.store_lost(beats))
        elif peer.process is None and lived and peer.silent - self._store_still >= self._silence(following):
            seconds = peer.silent * self.limits.beat_s
            cause = f"was last heard of {seconds:.0f} s ago (it was stopped, or its node or network is down)"
            self.post(self.verdict_on(following, cause))
        return self.verdict is not None

    def _silence(self, rank: int) -> int:
        """Beats without a heartbeat until a rank is given up."""
        row = self.row_of(rank)
        return self.limits.silent * (1 if row is not None and Phase(row[Cell.PHASE]).trains else 6)

    def _store_is_gone(self, beats: Beats) -> bool:
        """Whether the host of the store is needed, and is not there. It may be the first to end after a good run."""
        if beats.lost is None:
            return self._store_still >= self.limits.silent
        if (row := self.row_of(0)) is not None and row[Cell.BYE]:
            return False
        if self.row[Cell.ACTIVITY] == Activity.WAITING:
            return self._still >= self.limits.stopped
        return self._still >= self.limits.silent and Phase(self.row[Cell.PHASE]).trains

    def _look_for_stall(self) -> None:
        progress = self.progress()
        if (found := awaited(progress, self.rank, self._stall)) is not None:
            rank, cause = found
            seconds = self._stall * self.limits.beat_s
            self.post(self.verdict_on(rank, f"{cause}, and others waited for it for {seconds:.0f} s", hangs=True))
        elif not self._warned and (found := awaited(progress, self.rank, self.limits.warn)) is not None:
            self._warned = True
            row = self.row_of(found[0])
            if row is not None and self._is_first(found[0]):
                where = Phase(row[Cell.PHASE]).words(row[Cell.STEP])
                seconds = self.limits.warn * self.limits.beat_s
                _print(f"rank {found[0]}, {where}, {found[1]}; others have waited for it for {seconds:.0f} s.")

    def progress(self) -> dict[int, Progress]:
        """What is known of every rank."""
        known = {}
        for rank in range(self.world):
            if (row := self.row_of(rank)) is None:
                continue
            peer = self.peers.get(rank)
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
        everybody = self.failing or self._still >= self.limits.look or self.verdict is not None
        ranks = range(self.world) if everybody else {0, (self.rank + 1) % self.world}
        return [rank for rank in ranks if rank != self.rank and self.peers[rank].process is None]

    # ---- after a verdict --------------------------------------------------------------------------------------------

    def _after_verdict(self, verdict: Verdict) -> None:
        if verdict.rank == self.rank and not self.failing:
            self._end_named(verdict)
        if not self.row[Cell.KNOWS] and self._settled(verdict):
            if self._is_first(verdict.rank):
                _print(self.message())
            self.row[Cell.KNOWS] = 1
        named = self.peers.get(verdict.rank)
        if named is not None and named.process is not None and named.alive and self._must_end(verdict, named):
            named.process.kill()
        if self._since >= self.limits.stuck and self._cannot_be_woken():
            _print(f"[rank {self.rank}] is ended; its main thread was here:\n{main_stack(self._main)}")
            os._exit(_STUCK)

    def _settled(self, verdict: Verdict) -> bool:
        """Whether the message is complete."""
        return not verdict.hangs or self.board.stack() is not None or self._since > self.limits.grace

    def _is_first(self, but: int = -1) -> bool:
        """Whether this is the lowest living rank of its node, apart from one."""
        alive = {rank for rank, peer in self.peers.items() if peer.process is not None and peer.alive}
        alive = {rank for rank in alive if not self.board.rows[rank][Cell.BYE]} | {self.rank}
        return self.rank == min(alive - {but} or alive)

    def _must_end(self, verdict: Verdict, named: Peer) -> bool:
        """Whether the named rank is to be killed: it was stopped, or did not end itself."""
        row = self.board.rows[verdict.rank]
        if row[Cell.FAILING] or row[Cell.BYE]:
            return False
        return named.stopped > 0 or self._since >= self.limits.grace

    def _end_named(self, verdict: Verdict) -> None:
        """This rank is the one: leave the stack, and go."""
        if verdict.hangs:
            stack = main_stack(self._main)
            self.board.post_stack(stack)
            if self.beats is not None:
                self.beats.post_stack(stack, _ANSWER_S)
        os._exit(_FAILED)

    def _cannot_be_woken(self) -> bool:
        """Whether the main thread waits for what will not come; not while a rank writes its last checkpoint."""
        if self.failing:
            return activity(self._main) == Activity.WAITING
        return not any(
            peer.alive and self.board.rows[rank][Cell.FAILING] and not self.board.rows[rank][Cell.BYE]
            for rank, peer in self.peers.items()
            if peer.process is not None
        )

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")


def _print(text: str) -> None:
    print(f"\ncommopt: {text}", file=sys.stderr, flush=True)
