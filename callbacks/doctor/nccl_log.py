"""What NCCL says of itself: variables, and the transports in its log."""

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["log_lines", "transports", "variables"]

_VIA = re.compile(r"NCCL INFO Channel .* via (NET/[A-Za-z_]+|P2P|SHM)")
_READ_BYTES = 1 << 24


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's variables, and those that tell gloo its interface."""
    return {k: v for k, v in sorted(environment.items()) if k.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_"))}


def transports(lines: Iterable[str]) -> dict[str, int]:
    """Return the transports that NCCL chose, by number of channels, from its log at level INFO."""
    return dict(Counter(found[1] for line in lines if (found := _VIA.search(line)) is not None))


def log_lines(environment: Mapping[str, str]) -> list[str] | None:
    """Return what NCCL wrote into the file of ``NCCL_DEBUG_FILE``; None where there is none."""
    name = environment.get("NCCL_DEBUG_FILE")
    if name is None or environment.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE"):
        return None
    path = Path(name.replace("%h", socket.gethostname().split(".")[0]).replace("%p", str(os.getpid())))
    if not path.is_file():
        return None
    with path.open(errors="replace") as file:
        return file.read(_READ_BYTES).splitlines()
