"""Memory that the ranks of a node share, so that what one knows outlives it and never waits for another process."""

import json
import mmap
import os
import tempfile
from enum import IntEnum, auto

from lightning_commopt.failure.verdict import Verdict

__all__ = ["Board", "Cell"]

_LONGEST = 1_000_000  # bytes of the log


class Cell(IntEnum):
    """What a rank writes down about itself, each in 8 bytes."""

    SERIAL = 0  # grows with every change of phase
    PHASE = auto()
    STEP = auto()
    BATCH = auto()
    BEAT = auto()  # grows as long as the watch of the rank lives
    ACTIVITY = auto()
    TERMINATED = auto()  # SIGTERM came
    FAILING = auto()  # the main thread is on its way out with an error
    KNOWS = auto()  # the verdict has arrived, and is printed where it is to be
    BYE = auto()  # the run ended here


_ROW = 16


class Board:
    """A row of cells a rank, followed by a log. The first verdict in the log is the one that counts.

    An append is one `write`, which the kernel orders, so that no lock can be left behind by a process that dies.

    Args:
        world: Number of rows.
        fd: Of the memory; a new one where it is None.

    """

    def __init__(self, world: int, fd: int | None = None) -> None:
        self._size = -(-world * _ROW * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is None:
            fd = _anonymous_file()
            os.truncate(fd, self._size)
        self.fd = fd
        self._map = mmap.mmap(fd, self._size)
        self._cells = memoryview(self._map).cast("q")
        self.rows = [self._cells[rank * _ROW : (rank + 1) * _ROW] for rank in range(world)]

    @classmethod
    def of(cls, world: int, pid: int, fd: int) -> "Board":
        """Open the board that a process of this node has made.

        Raises:
            OSError: It cannot be opened.

        """
        return cls(world, os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))

    def post(self, verdict: Verdict) -> Verdict:
        """Write a verdict down, and return the first one."""
        self._append("verdict", verdict.dump())
        first = self.verdict()
        assert first is not None
        return first

    def verdict(self) -> Verdict | None:
        """Return the first verdict."""
        line = self._first("verdict")
        return None if line is None else Verdict.load(line)

    def post_stack(self, stack: str) -> None:
        """Write the stack of the named rank down."""
        self._append("stack", stack)

    def stack(self) -> str | None:
        """Return the first stack."""
        return self._first("stack")

    def close(self) -> None:
        """Let go of the memory. Rows stay readable and writable, for this process alone."""
        rows = [memoryview(bytearray(row.tobytes())).cast("q") for row in self.rows]
        for view in (*self.rows, self._cells):
            view.release()
        self.rows = rows
        self._map.close()
        os.close(self.fd)

    def _append(self, kind: str, text: str) -> None:
        os.write(self.fd, json.dumps([kind, text]).encode() + b"\n")

    def _first(self, kind: str) -> str | None:
        if os.fstat(self.fd).st_size == self._size:
            return None
        lines = os.pread(self.fd, _LONGEST, self._size).split(b"\n")[:-1]
        return next((text for name, text in map(json.loads, lines) if name == kind), None)


def _anonymous_file() -> int:
    """Return a file without a name, open for appending."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lightning_commopt", os.MFD_CLOEXEC)
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            pass
        finally:
            os.close(fd)
    fd, path = tempfile.mkstemp()
    os.close(fd)
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    os.unlink(path)
    return fd
