"""What a trace of `torch.profiler` says about computing and communicating."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TraceTimes", "read_trace", "times_of"]

_OURS = "lightning_commopt::"
_COLLECTIVES = ("gloo:", f"{_OURS}collective", f"{_OURS}all_")
_CODEC = (f"{_OURS}encode", f"{_OURS}decode")

Stretch = tuple[float, float]
Event = dict[str, Any]


@dataclass(frozen=True)
class TraceTimes:
    """An average step of one rank, in milliseconds.

    Args:
        step_ms: Wall time.
        compute_ms: Time in which the model or the optimizer computed: operators on the CPU, kernels on a GPU.
        communication_ms: Time in which a collective ran, waiting for other ranks included.
        overlap_ms: The part of it under compute.
        codec_ms: Time for encoding and decoding.

    """

    step_ms: float
    compute_ms: float
    communication_ms: float
    overlap_ms: float
    codec_ms: float

    @property
    def exposed_ms(self) -> float:
        """Communication with no compute over it."""
        return self.communication_ms - self.overlap_ms


def read_trace(path: Path) -> list[Event]:
    """Return the events with a duration, of a file in Chrome's format."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def times_of(events: Iterable[Event], steps: int, *, cuda: bool) -> TraceTimes:
    """Add up a trace.

    Args:
        events: As :func:`read_trace` returns them.
        steps: Optimizer steps in the trace.
        cuda: Whether kernels count, on their streams. Otherwise operators do, on the threads of the model.

    """
    events = list(events)
    kinds = _on_gpu(events) if cuda else _on_cpu(events)
    compute, communication, codec = (_union(map(_stretch, kind)) for kind in kinds)
    whole = _union(_stretch(event) for event in events if event["name"].startswith("ProfilerStep#"))
    overlap = _length(compute) + _length(communication) - _length(_union([*compute, *communication]))
    totals_us = (_length(whole), _length(compute), _length(communication), overlap, _length(codec))
    return TraceTimes(*(total / steps / 1e3 for total in totals_us))


def _on_cpu(events: list[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """Tell events apart: compute, communication, codec. Threads that exchange do not compute."""
    communication = [e for e in events if e["name"].startswith(_COLLECTIVES)]
    codec = [e for e in events if e["name"] in _CODEC]
    exchanging = {event["tid"] for event in (*communication, *codec)} - _main_threads(events)
    compute = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] not in exchanging and not event["name"].startswith("c10d::")
    ]
    return compute, communication, codec


def _on_gpu(events: list[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """The same from kernels. Those of the codec lie within its annotation on their stream."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    codec = [e for e in events if e.get("cat") == "gpu_user_annotation" and e["name"] in _CODEC]
    communication = [kernel for kernel in kernels if kernel["name"].startswith("nccl")]
    encoding: dict[Any, list[Stretch]] = {}
    for annotation in codec:
        encoding.setdefault(annotation["tid"], []).append(_stretch(annotation))
    compute = [
        kernel
        for kernel in kernels
        if not kernel["name"].startswith("nccl")
        and not any(start <= kernel["ts"] <= end for start, end in encoding.get(kernel["tid"], ()))
    ]
    return compute, communication, codec


def _main_threads(events: list[Event]) -> set[Any]:
    """Return the thread that takes the steps."""
    return {event["tid"] for event in events if event["name"].startswith("ProfilerStep#")}


def _stretch(event: Event) -> Stretch:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches that do not touch, for some that may."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _length(stretches: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in stretches)
