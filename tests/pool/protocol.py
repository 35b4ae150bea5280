"""What the test process and its workers say to each other."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_OUTPUT_LIMIT = 8000


@dataclass(frozen=True)
class Hello:
    """A worker waits for a task.

    Args:
        rank: The rank that it will have.
        pid: Its process, also the id of its process group.
        previous: Exit code of the process that had this rank before, None for the first.
    """

    rank: int
    pid: int
    previous: int | None


@dataclass(frozen=True)
class Task:
    """One call in one rank.

    Args:
        call: Pickled `(function, args, kwargs)`.
        environment: Variables to set before the call.
        backend: Backend of the default process group, None for no group.
        sys_path: Import path of the test process.
    """

    call: bytes
    environment: Mapping[str, str]
    backend: str | None
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Success:
    """The value that a rank returned."""

    value: Any


class RankError(NamedTuple):
    """Why a rank returned no value.

    Args:
        type_name: Class name of the exception; `TimeoutError`, `NoAnswer` or `WorkerDied` where there was none.
        message: Its text.
        traceback: Its traceback, or the stacks of all threads where the rank hung.
    """

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "RankError":
        """Describes an exception, without the frame of the worker that called the function."""
        frames = error.__traceback__ and error.__traceback__.tb_next
        lines = traceback.format_exception(type(error), error, frames)
        return cls(type(error).__name__, str(error), "".join(lines))

    def __str__(self) -> str:
        """The last line of a traceback."""
        return f"{self.type_name}: {self.message}"


class WorkerFailure(Exception):
    """At least one rank of a run returned no value.

    Attributes:
        errors: The error of each rank that failed, in order of arrival: the first one is the likely cause.
        results: The value of each rank that returned one.
        output: What each rank printed (stdout and stderr).
    """

    def __init__(self, errors: dict[int, RankError], results: dict[int, Any], output: dict[int, str]) -> None:
        self.errors = errors
        self.results = results
        self.output = output
        super().__init__(self._report())

    def _report(self) -> str:
        rank, cause = next(iter(self.errors.items()))
        parts = [f"rank {rank}: {cause} ({len(self.errors)} of {len(self.output)} ranks failed)"]
        parts += [f"---- rank {rank}: {error}\n{error.traceback}" for rank, error in self.errors.items()]
        parts += [f"---- output of rank {rank}\n{text[-_OUTPUT_LIMIT:]}" for rank, text in self.output.items() if text]
        return "\n\n".join(part.rstrip() for part in parts)
