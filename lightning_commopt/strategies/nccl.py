"""NCCL's environment variables as an option of a strategy."""

import os
import re
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy
    from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = ["NcclOptions", "export", "nccl_variables", "refuse_without_nccl", "same_on_all_ranks", "set_nccl_variables"]

NcclOptions = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class _Variable:
    """What NCCL accepts for a variable.

    Args:
        expected: In words.
        spelling: Returns a value as NCCL spells it, None for one that it would refuse or ignore.

    """

    expected: str
    spelling: Callable[[str], str | None]


def _one_of(*words: str) -> _Variable:
    by_lower_case = {word.lower(): word for word in words}
    return _Variable(f"one of {', '.join(words)}", lambda value: by_lower_case.get(value.lower()))


def _whole(low: int, high: int | None = None) -> _Variable:
    def spelling(value: str) -> str | None:
        holds = re.fullmatch(r"-?\d+", value) and low <= int(value) and (high is None or int(value) <= high)
        return value if holds else None

    return _Variable(f"a whole number from {low}" + (" on" if high is None else f" to {high}"), spelling)


def _matching(pattern: str, expected: str) -> _Variable:
    return _Variable(expected, lambda value: value if re.fullmatch(pattern, value, re.IGNORECASE) else None)


def _selection(*names: str) -> _Variable:
    """``a,b`` or ``^a,b`` (all but these), also for single functions: ``^a;allreduce:b``."""
    some = r"\^?(?:{0})(?:,(?:{0}))*".format("|".join(names))
    each = f"(?:broadcast|reduce|allgather|reducescatter|allreduce):{some}"
    expected = f"a list of {', '.join(names)} ('{names[0]},{names[1]}', '^{names[1]}', 'allreduce:{names[0]}')"
    return _matching(f"(?:{some}|{each})(?:;{each})*", expected)


def _list(*names: str) -> _Variable:
    one = r"\^?(?:{})".format("|".join(names))
    return _matching(f"{one}(?:,{one})*", f"a list of {', '.join(names)}, with ^ before those to leave out")


_SWITCH = _one_of("0", "1")
_PATH = _matching(r"[^~\s].*", "a path, written out (NCCL does not expand `~`)")
_NAMES = _matching(r"\S+", "a list without spaces, such as 'eth0,eth1' or '^docker'")
_NAME = _matching(r"\S+", "a name without spaces")
_DISTANCES = ("PIX", "PXB", "PHB", "SYS")
_SUBSYSTEMS = "INIT COLL P2P SHM NET GRAPH TUNING ENV ALLOC ALLOC_HOST CALL PROXY NVLS BOOTSTRAP REG PROFILE RAS ALL"

# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL 2.30.
_VARIABLES: dict[str, _Variable] = {
    "ALGO": _selection("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"),
    "BUFFSIZE": _whole(1),
    "CGA_CLUSTER_SIZE": _whole(0, 8),
    "COLLNET_ENABLE": _SWITCH,
    "CROSS_NIC": _one_of("0", "1", "2"),
    "CUMEM_ENABLE": _SWITCH,
    "DEBUG": _one_of("VERSION", "WARN", "INFO", "TRACE"),
    "DEBUG_FILE": _PATH,
    "DEBUG_SUBSYS": _list(*_SUBSYSTEMS.split()),
    "DMABUF_ENABLE": _SWITCH,
    "IB_ADAPTIVE_ROUTING": _SWITCH,
    "IB_DISABLE": _SWITCH,
    "IB_GID_INDEX": _whole(-1),
    "IB_HCA": _NAMES,
    "IB_PCI_RELAXED_ORDERING": _one_of("0", "1", "2"),
    "IB_QPS_PER_CONNECTION": _whole(1, 128),
    "IB_RETRY_CNT": _whole(0, 7),
    "IB_SL": _whole(0, 15),
    "IB_SPLIT_DATA_ON_QPS": _SWITCH,
    "IB_TC": _whole(0, 255),
    "IB_TIMEOUT": _whole(0, 31),
    "IGNORE_CPU_AFFINITY": _SWITCH,
    "LAUNCH_ORDER_IMPLICIT": _SWITCH,
    "MAX_CTAS": _whole(1, 64),
    "MAX_NCHANNELS": _whole(1),
    "MIN_CTAS": _whole(1, 64),
    "MIN_NCHANNELS": _whole(1),
    "MNNVL_ENABLE": _one_of("0", "1", "2"),
    "NET": _NAME,
    "NET_GDR_LEVEL": _one_of("LOC", *_DISTANCES),
    "NET_GDR_READ": _SWITCH,
    "NET_PLUGIN": _NAME,
    "NSOCKS_PERTHREAD": _whole(1, 64),
    "NTHREADS": _one_of("64", "128", "256", "512"),
    "NVLS_ENABLE": _one_of("0", "1", "2"),
    "P2P_DISABLE": _SWITCH,
    "P2P_LEVEL": _one_of("LOC", "NVL", *_DISTANCES),
    "PROTO": _selection("LL", "LL128", "Simple"),
    "PXN_DISABLE": _SWITCH,
    "RAS_ENABLE": _SWITCH,
    "SHM_DISABLE": _SWITCH,
    "SOCKET_FAMILY": _one_of("AF_INET", "AF_INET6"),
    "SOCKET_IFNAME": _NAMES,
    "SOCKET_NTHREADS": _whole(1, 16),
    "TOPO_DUMP_FILE": _PATH,
    "TOPO_FILE": _PATH,
    "TUNER_PLUGIN": _NAME,
}

_MAY_DIFFER = ("DEBUG", "IB_GID_INDEX", "IB_HCA", "SOCKET_IFNAME", "TOPO_")
"""Beginnings of the names of variables that describe a node rather than the run."""


def nccl_variables(options: NcclOptions | None) -> dict[str, str]:
    """Return environment variables by full name, with values as NCCL spells them.

    Args:
        options: By name, with or without ``NCCL_``, in upper or lower case.

    Raises:
        ValueError: A variable is not known or given twice, or NCCL would not accept a value.

    """
    variables: dict[str, str] = {}
    for key, value in (options or {}).items():
        name = key.upper().removeprefix("NCCL_")
        if f"NCCL_{name}" in variables:
            raise ValueError(f"`nccl` has `{name}` twice: once is enough, with or without `NCCL_`.")
        variables[f"NCCL_{name}"] = _spelling(name, value)
    sockets = [int(variables.get(f"NCCL_{name}", 1)) for name in ("SOCKET_NTHREADS", "NSOCKS_PERTHREAD")]
    if sockets[0] * sockets[1] > 64:
        raise ValueError(
            f"`nccl`: `SOCKET_NTHREADS={sockets[0]}` times `NSOCKS_PERTHREAD={sockets[1]}` must not exceed 64."
        )
    return variables


def _spelling(name: str, value: str | int | bool) -> str:
    """Return a value as NCCL spells it, or raise."""
    if name not in _VARIABLES:
        close = get_close_matches(name, _VARIABLES, n=3)
        meant = f" Did you mean {' or '.join(f'`{other}`' for other in close)}?" if close else ""
        raise ValueError(
            f"`nccl` does not know the variable `{name}`.{meant} Set another one in the environment of all ranks."
        )
    text = str(int(value)) if isinstance(value, bool) else str(value)
    spelling = _VARIABLES[name].spelling(text)
    if spelling is None:
        raise ValueError(f"`nccl={{{name!r}: {value!r}}}`: `{name}` must be {_VARIABLES[name].expected}.")
    return spelling


def refuse_without_nccl(device: str, backend: str | None, available: bool) -> None:
    """Refuse NCCL's variables where nothing would read them.

    Args:
        device: Type of the device that holds the gradients.
        backend: Backend that the user chose for the process group, None for the device's own.
        available: Whether this build of torch has NCCL.

    Raises:
        ValueError: Saying what to do instead.

    """
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    if device != "cuda" or "nccl" not in backend:
        raise ValueError(
            f"`nccl=...` cannot be honoured: gradients on {device} travel by {backend}. Leave `nccl` out, or use "
            "CUDA devices with their own backend."
        )
    if not available:
        raise ValueError("`nccl=...` cannot be honoured: this build of torch has no NCCL. Leave `nccl` out.")


def export(variables: Mapping[str, str], environment: MutableMapping[str, str]) -> tuple[str, bool]:
    """Set variables in an environment.

    Args:
        variables: By full name.
        environment: Changed in place.

    Returns:
        One line that says what was set, and whether another value had to give way.

    """
    before = {name: environment.get(name) for name in variables}
    environment.update(variables)
    yielded = {name: old for name, old in before.items() if old not in (None, variables[name])}
    words = [f"{name}={v}" + f" (not {before[name]})" * (name in yielded) for name, v in variables.items()]
    reason = "; where the environment had another value, the argument `nccl` wins" if yielded else ""
    return f"commopt: set {', '.join(words)}{reason}.", bool(yielded)


def set_nccl_variables(strategy: "CommOptStrategy | CommOptShardedStrategy") -> None:
    """Set a strategy's variables in this process, before its process group is made, and say so once a node.

    They stay set: NCCL reads a variable once in the life of a process, and the process group outlives a fit, so an
    environment restored after it would no longer tell what is in force.

    Raises:
        ValueError: There is no NCCL to read them, a file to be read does not exist.
        RuntimeError: The process group exists, and other values were in force when it was made.

    """
    variables = strategy.nccl
    if not variables:
        return
    refuse_without_nccl(strategy.root_device.type, strategy._process_group_backend, dist.is_nccl_available())
    if dist.is_initialized():
        _require_in_force(variables)
        return
    topology = variables.get("NCCL_TOPO_FILE")
    if topology is not None and not os.path.isfile(topology):
        raise ValueError(f"`nccl={{'TOPO_FILE': {topology!r}}}`: there is no such file on this node.")
    line, another_value_yielded = export(variables, os.environ)
    if strategy.local_rank != 0:
        return
    if another_value_yielded:
        warnings.warn(line, stacklevel=2)
    else:
        rank_zero_info(line)


def _require_in_force(variables: Mapping[str, str]) -> None:
    """Raise unless the environment already has these values, as in a second fit."""
    late = [f"{name}={value}" for name, value in variables.items() if os.environ.get(name) != value]
    if late:
        raise RuntimeError(
            f"`nccl=...` comes too late for {', '.join(late)}: the process group exists, and NCCL reads its variables "
            "when it is made. Set them in the environment before, or let the strategy make the process group."
        )


def same_on_all_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must not differ between ranks."""
    return {n: value for n, value in variables.items() if not n.removeprefix("NCCL_").startswith(_MAY_DIFFER)}
