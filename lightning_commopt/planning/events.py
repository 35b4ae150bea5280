"""A small discrete-event simulation: work on streams, messages over links that several ranks share."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

__all__ = ["Task", "Timeline", "run"]

_DONE = 1e-9


@dataclass(frozen=True)
class Task:
    """Something that occupies streams for a while.

    Args:
        streams: What it occupies, all at once: a device that computes, a thread that exchanges. A stream takes its
            tasks in the order of the list, as CUDA streams do. Ranks that meet in a collective are one task on a stream
            of each.
        after: Tasks, by their place in the list, that must have ended before.
        work_ms: Time that it takes by itself.
        links: ``(name, ms)``: after the work, it moves something over these links at once; ms if it were alone there.
            Tasks on a link at the same time get an equal share each.
        latency_ms: After which what follows sees it ended; its streams are free before.
        node_bytes: That a node sends to others meanwhile; the clock does not ask for it.

    """

    streams: tuple[str, ...]
    after: tuple[int, ...] = ()
    work_ms: float = 0.0
    links: tuple[tuple[str, float], ...] = ()
    latency_ms: float = 0.0
    node_bytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What came of some tasks, ms, by their place in the list.

    Args:
        starts: When each took its streams.
        ends: When what follows could go on.

    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def end(self) -> float:
        """When all was over."""
        return max(self.ends, default=0.0)


class _Transfers:
    """Messages under way; each gets an equal share of every link that it uses."""

    def __init__(self) -> None:
        self._left: dict[int, float] = {}  # part that is still to come
        self._links: dict[int, tuple[tuple[str, float], ...]] = {}
        self._users: dict[str, int] = defaultdict(int)

    def add(self, task: int, links: tuple[tuple[str, float], ...]) -> None:
        self._left[task], self._links[task] = 1.0, links
        for name, _ in links:
            self._users[name] += 1

    def next_ms(self) -> float:
        """Time until the first of them is through."""
        return min((left * self._alone_ms(task) for task, left in self._left.items()), default=float("inf"))

    def advance(self, elapsed_ms: float) -> list[int]:
        """Go on by some time; return those that are through."""
        times = {task: self._alone_ms(task) for task in self._left}
        through = []
        for task, whole_ms in times.items():
            self._left[task] -= elapsed_ms / whole_ms
            if self._left[task] <= _DONE or self._left[task] * whole_ms <= _DONE:
                through.append(task)
        for task in through:
            del self._left[task]
            for name, _ in self._links.pop(task):
                self._users[name] -= 1
        return through

    def _alone_ms(self, task: int) -> float:
        """Time for all of it at its present share."""
        return max(ms * self._users[name] for name, ms in self._links[task])


class _Run:
    """The state of one simulation."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._queues: dict[str, deque[int]] = defaultdict(deque)
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._missing = [len(set(task.after)) for task in tasks]
        for index, task in enumerate(tasks):
            for stream in task.streams:
                self._queues[stream].append(index)
            for before in set(task.after):
                self._followers[before].append(index)
        self._busy: set[str] = set()
        self._timers: list[tuple[float, int, int]] = []  # when, task, which of its parts ends
        self._transfers = _Transfers()
        self._now = 0.0
        self._candidates = {queue[0] for queue in self._queues.values()} | {
            index for index, task in enumerate(tasks) if not task.streams
        }
        self.starts, self.ends = [float("nan")] * len(tasks), [float("nan")] * len(tasks)
        self.left = len(tasks)

    def step(self) -> bool:
        """Go on to the next event; return whether there was one."""
        while self._candidates:
            self._start_if_possible(self._candidates.pop())
        at_timer = self._timers[0][0] if self._timers else float("inf")
        when = min(at_timer, self._now + self._transfers.next_ms())
        if when == float("inf"):
            return False
        through = self._transfers.advance(when - self._now)
        self._now = when
        for task in through:
            self._free(task)
        while self._timers and self._timers[0][0] <= when + _DONE:
            _, task, part = heappop(self._timers)
            (self._send, self._end)[part](task)
        return True

    def _start_if_possible(self, index: int) -> None:
        task = self._tasks[index]
        if self._missing[index] or self.starts[index] == self.starts[index]:
            return
        if any(stream in self._busy or self._queues[stream][0] != index for stream in task.streams):
            return
        self._busy.update(task.streams)
        self.starts[index] = self._now
        heappush(self._timers, (self._now + task.work_ms, index, 0))

    def _send(self, index: int) -> None:
        """The work is done: what it moves sets out."""
        links = tuple((name, ms) for name, ms in self._tasks[index].links if ms > _DONE)
        if links:
            self._transfers.add(index, links)
        else:
            self._free(index)

    def _free(self, index: int) -> None:
        """The streams of a task are free."""
        for stream in self._tasks[index].streams:
            self._busy.discard(stream)
            queue = self._queues[stream]
            queue.popleft()
            if queue:
                self._candidates.add(queue[0])
        heappush(self._timers, (self._now + self._tasks[index].latency_ms, index, 1))

    def _end(self, index: int) -> None:
        """What follows a task sees it ended."""
        self.ends[index] = self._now
        self.left -= 1
        for follower in self._followers[index]:
            self._missing[follower] -= 1
            self._candidates.add(follower)


def run(tasks: Sequence[Task]) -> Timeline:
    """Run tasks on a clock.

    Args:
        tasks: In the order in which each stream takes them.

    Raises:
        ValueError: Tasks wait for each other in a circle.

    """
    simulation = _Run(tasks)
    while simulation.step():
        pass
    if simulation.left:
        raise ValueError(f"`{simulation.left}` of `{len(tasks)}` tasks wait for each other in a circle.")
    return Timeline(tuple(simulation.starts), tuple(simulation.ends))
