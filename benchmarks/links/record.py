"""What a run leaves: raw numbers of every step, as JSON."""

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "Series", "read_runs"]


@dataclass
class Series:
    """One mode, step by step. A step is as long as on the rank that took longest, whose parts are given.

    Args:
        step_ms: From the common start until parameters are updated.
        forward_ms: Of it, forward.
        backward_ms: Of it, backward, with all that it waits for.
        optimizer_ms: Of it, the optimizer.
        codec_ms: CPU time of the thread that encodes and decodes.
        tx_bytes: Sent through the interface, headers included, mean over ranks.
        losses: Mean over ranks.
        bucket_numels: Elements in each bucket.
        hops: Messages one after the other that a bucket needs at least.
        promised_bytes: What the method promised a rank would send a step; 0 where there is no promise.
        spans_ms: Of our modes on rank 0, mean wall time a step by phase of the exchange.
        replicas_equal: Whether all ranks ended with the same bits.

    """

    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    codec_ms: list[float] = field(default_factory=list)
    tx_bytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bucket_numels: list[int] = field(default_factory=list)
    hops: int = 0
    promised_bytes: float = 0.0
    spans_ms: dict[str, float] = field(default_factory=dict)
    replicas_equal: bool | None = None


@dataclass
class Run:
    """All modes of one launch (or, under Lightning, one launch a mode).

    Args:
        ranks: Processes.
        rate: Of every link.
        warm_up: Steps before those recorded.
        lightning: Whether Lightning drove the loop; steps of modes are then not interleaved.
        parameters: Of the model.
        latency_ms: Half of an empty round trip between two ranks.
        ready: ``(elements, ms)``: gradients there, and how long after the beginning of backward.
        machine: Where it ran.
        series: By mode.

    """

    ranks: int
    rate: str
    warm_up: int
    lightning: bool = False
    parameters: int = 0
    latency_ms: float = 0.0
    ready: list[tuple[int, float]] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Ranks and rate in words."""
        rate = "unshaped" if self.rate == "none" else self.rate
        return f"{self.ranks} ranks, {rate}{', Lightning' if self.lightning else ''}"

    def write(self, path: Path) -> None:
        """Write it as JSON, numbers with four digits after the point."""
        path.write_text(json.dumps(_rounded(asdict(self)), indent=None, separators=(", ", ": ")) + "\n")

    def write_new(self, folder: Path, stem: str) -> Path:
        """Write it under the next free number, so that no result is overwritten, and return where."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = (folder / f"{stem}-{number}.json" for number in itertools.count(1))
        path = next(path for path in paths if not path.exists())
        self.write(path)
        return path

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Return the run in a file."""
        values: dict[str, Any] = json.loads(path.read_text())
        values["series"] = {mode: Series(**series) for mode, series in values["series"].items()}
        values["ready"] = [(numel, ms) for numel, ms in values["ready"]]
        return cls(**values)


def read_runs(folder: Path) -> list[Run]:
    """Return all runs in a folder, by name of their files."""
    return [Run.read(path) for path in sorted(folder.glob("links-*.json"))]


def _rounded(value: Any) -> Any:
    """Round every float inside."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
