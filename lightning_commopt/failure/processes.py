"""Processes of this node, as the kernel knows them."""

import os
import platform
import signal
import sys
import traceback
from pathlib import Path

from lightning_commopt.failure.phase import Activity

__all__ = ["Process", "activity", "main_stack", "node_identity"]


def node_identity() -> str:
    """Return what processes have in common that see each other by their ids: host, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: every rank is a node of its own, and heartbeats tell of it
        return f"{platform.node()} {os.getpid()}"


class Process:
    """Another process, held by a descriptor, so that its id cannot come to mean another one.

    Args:
        pid: Its id.

    Raises:
        OSError: It cannot be held.
        AttributeError: This platform has no such descriptors.

    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def stopped(self) -> bool:
        """Whether SIGSTOP or Ctrl-Z holds it. A debugger that does is left alone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] == "T"

    def kill(self) -> None:
        """End it."""
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def activity(thread: int) -> Activity:
    """Return what a thread does, as its Python stack tells."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Activity.RUNNING
    where = frame.f_code.co_filename
    if "/torch/distributed/" in where or where.endswith("/torch/nn/parallel/distributed.py"):
        return Activity.WAITING
    if frame.f_code.co_name == "_engine_run_backward":
        return Activity.WAITING
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("/_dynamo/convert_frame.py") or code.co_name == "compile_fx_inner":
            return Activity.COMPILING
        frame = frame.f_back
    return Activity.RUNNING


def main_stack(thread: int) -> str:
    """Return the innermost frames of a thread."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-8:]) if frame is not None else "(no stack)\n"
