"""A network of ranks on one machine, with links of a chosen rate."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Network", "NetworkError", "bits_per_second", "change_rate", "why_not"]

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class NetworkError(RuntimeError):
    """The network could not be made."""


def bits_per_second(rate: str) -> float:
    """Return a rate as a number: ``"100mbit"`` is 1e8, ``"none"`` is infinite.

    Raises:
        ValueError: The word is no rate.

    """
    if rate == "none":
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"`{rate}` is not a rate: write a number and kbit, mbit or gbit, such as 100mbit, or none.")
    return float(match[1]) * _UNITS[match[2]]


def why_not() -> str | None:
    """Return why this machine may not make such a network, None if it may."""
    try:
        with Network(1, "1gbit"):
            return None
    except NetworkError as error:
        return str(error)


class Network:
    """One network namespace a rank, with ``eth0`` on a bridge in a namespace of its own.

    A context manager. ``tc tbf`` shapes both ends of every link, so a rank sends and receives at ``rate`` at most.
    Traffic never leaves the namespaces. Their names carry this process's id, so that runs do not meet, and only what
    was made here is taken down. Nothing but SIGKILL leaves a namespace behind, provided that SIGTERM and SIGHUP were
    turned into exceptions; signals wait while the network is made and taken down.

    Args:
        ranks: Number of ranks.
        rate: Of every link, as ``tc`` writes it; ``"none"`` leaves links unshaped.

    Raises:
        NetworkError: On entry: no Linux, not root, no iproute2, or the kernel refuses.

    """

    def __init__(self, ranks: int, rate: str) -> None:
        bits_per_second(rate)
        self.ranks, self.rate = ranks, rate
        self._made: list[str] = []

    def __enter__(self) -> "Network":
        self._check()
        try:
            with _signals_wait():
                self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the namespaces that were made; links and queues go with them."""
        with _signals_wait():
            while self._made:
                subprocess.run(["ip", "netns", "delete", self._made.pop()], check=False)

    def namespace(self, rank: int) -> str:
        """Name of a rank's namespace."""
        return f"{self._stem}-{rank}"

    def address(self, rank: int) -> str:
        """Address of a rank."""
        return f"10.77.0.{rank + 1}"

    def inside(self, rank: int, command: list[str]) -> list[str]:
        """Return ``command`` as it runs in a rank's namespace."""
        return ["ip", "netns", "exec", self.namespace(rank), *command]

    @property
    def _stem(self) -> str:
        return f"links-{os.getpid()}"

    def _check(self) -> None:
        if os.name != "posix" or not os.path.isdir("/proc/sys/net"):
            raise NetworkError("Network namespaces need Linux.")
        if os.geteuid() != 0:
            raise NetworkError("Making network namespaces needs root: run as root, or in a container with SYS_ADMIN.")
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise NetworkError(f"`{missing[0]}` is not installed: install iproute2 (`apt-get install iproute2`).")

    def _set_up(self) -> None:
        hub = f"{self._stem}-hub"
        self._add(hub)
        _run(f"ip -n {hub} link add br0 type bridge")
        _run(f"ip -n {hub} link set br0 up")
        for rank in range(self.ranks):
            host = self.namespace(rank)
            self._add(host)
            _run(f"ip link add eth0 netns {host} type veth peer name p{rank} netns {hub}")
            _run(f"ip -n {host} address add {self.address(rank)}/24 dev eth0")
            _run(f"ip -n {host} link set lo up")
            _run(f"ip -n {host} link set eth0 up")
            _run(f"ip -n {hub} link set p{rank} master br0 up")
        if self.rate != "none":
            _shape("add", self._stem, self.ranks, self.rate)

    def _add(self, name: str) -> None:
        _run(f"ip netns add {name}")
        self._made.append(name)


def change_rate(launcher: int, ranks: int, rate: str) -> None:
    """Change the rate of every link of a network that is in use; a process of it may call this.

    Args:
        launcher: The process that entered the network.
        ranks: Number of ranks.
        rate: Of every link from now on; links must have been shaped before.

    """
    _shape("change", f"links-{launcher}", ranks, rate)


def _shape(verb: str, stem: str, ranks: int, rate: str) -> None:
    for rank in range(ranks):
        for place, device in ((f"{stem}-{rank}", "eth0"), (f"{stem}-hub", f"p{rank}")):
            _run(f"tc -n {place} qdisc {verb} dev {device} root tbf rate {rate} burst 64kb latency 200ms")


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold signals that end the process back, for the commands run meanwhile too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(command: str) -> None:
    """Run a command that must succeed.

    Raises:
        NetworkError: It failed; with what it said.

    """
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")
