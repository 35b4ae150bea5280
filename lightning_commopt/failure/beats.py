"""What passes between nodes, through the store of the process group."""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store

from lightning_commopt.failure.verdict import Verdict

__all__ = ["Beats", "store_of_group"]

Answer = TypeVar("Answer")

_TIMEOUT = timedelta(seconds=20)


def store_of_group() -> Store:
    """Return a connection of one's own to the store of the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()
    else:  # torch before 2.7
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            store = dist.TCPStore(store.host, store.port, is_master=False)
    store.set_timeout(_TIMEOUT)
    return store


class Beats:
    """A thread that writes this rank's heartbeat, reads others', and carries verdicts.

    It may block for as long as the host of the store does; nobody waits for it without a limit.

    Args:
        store: A connection of its own, with a prefix of its own.
        rank: This rank.
        world: Number of ranks.
        period_s: Between two heartbeats.
        own: Gives this rank's row.
        wanted: Gives the ranks whose rows are needed now.
        heard: Is told a verdict and, if there is one, the stack.

    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        period_s: float,
        own: Callable[[], list[int]],
        wanted: Callable[[], Sequence[int]],
        heard: Callable[[Verdict, str | None], None],
    ) -> None:
        self.rows: dict[int, list[int]] = {}
        self.lost: str | None = None
        self.trips = 0
        self._store = store
        self._rank, self._world = rank, world
        self._period_s = period_s
        self._own, self._wanted, self._heard = own, wanted, heard
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="lightning_commopt beats", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def post(self, verdict: Verdict, timeout_s: float) -> Verdict | None:
        """Write a verdict down, and return the first one, or None if the store does not answer in time."""
        answer: queue.Queue[Verdict] = queue.Queue()

        def ask() -> None:
            answer.put(Verdict.load(self._store.compare_set("verdict", "", verdict.dump()).decode()))

        return self._ask(ask, answer, timeout_s)

    def post_stack(self, stack: str, timeout_s: float) -> None:
        """Write the stack of this rank down."""
        answer: queue.Queue[bool] = queue.Queue()
        self._ask(lambda: answer.put(self._store.compare_set("stack", "", stack) is None), answer, timeout_s)

    def send(self) -> None:
        """Write the heartbeat now, and do not wait for it."""
        self._jobs.put(self._beat)

    def close(self, timeout_s: float) -> None:
        """Say that the run has ended here, and end."""
        self._jobs.put(self._beat)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _ask(self, job: Callable[[], None], answer: "queue.Queue[Answer]", timeout_s: float) -> "Answer | None":
        self._jobs.put(job)
        with contextlib.suppress(queue.Empty):
            return answer.get(timeout=timeout_s if self.lost is None else 0.0)
        return None

    def _run(self) -> None:
        while True:
            try:
                try:
                    job = self._jobs.get(timeout=self._period_s)
                except queue.Empty:
                    job = self._beat
                if job is None:
                    return
                job()
            except Exception as error:  # the host of the store has ended, as it does after a good run too
                self.lost = f"{type(error).__name__}: {error}"
                return

    def _beat(self) -> None:
        """One exchange with the store."""
        self._store.set(f"row/{self._rank}", json.dumps(self._own()))
        if self._store.check(["verdict"]):
            stack = self._store.get("stack").decode() if self._store.check(["stack"]) else None
            self._heard(Verdict.load(self._store.get("verdict").decode()), stack)
        for rank in self._wanted():
            if self._store.check([f"row/{rank}"]):
                self.rows[rank] = json.loads(self._store.get(f"row/{rank}"))
        self.trips += 1
