"""What this process's host offers."""

import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["has_infiniband", "interface_to_others", "shared_memory_bytes"]

_SIOCGIFADDR = 0x8915


def has_infiniband() -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def shared_memory_bytes() -> int | None:
    """Return the size of ``/dev/shm``, through which workers of data loaders and NCCL pass data; None without one."""
    with suppress(OSError):
        status = os.statvfs("/dev/shm")
        return status.f_frsize * status.f_blocks
    return None


def interface_to_others(environment: Mapping[str, str], backend: str) -> str:
    """Return the network interface chosen by variable, else the one that leads to the main address."""
    chosen = environment.get("NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME")
    if chosen:
        return chosen
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return _interface_with(probe.getsockname()[0])
    return "unknown"


def _interface_with(address: str) -> str:
    if sys.platform != "linux":
        return address
    import fcntl

    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return address
