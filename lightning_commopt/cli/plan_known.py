"""What a run has measured, for a plan."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lightning_commopt.callbacks.report import RunFileError, read_run
from lightning_commopt.callbacks.report.content import ReportContent
from lightning_commopt.cli.errors import UsageError
from lightning_commopt.planning import Ranking
from lightning_commopt.planning.job import Precision
from lightning_commopt.tuning import Channel, CodecCost

__all__ = ["Known", "Told", "known_of"]


@dataclass(frozen=True)
class Told:
    """A run beside what is predicted of it.

    Args:
        method: In force.
        measured_ms: Of a step.
        predicted_ms: Of a step of the plan's cluster, data parallel by the same method.
        same_cluster: Whether the plan is for as many ranks as ran.

    """

    method: str
    measured_ms: float
    predicted_ms: float
    same_cluster: bool

    @property
    def sentence(self) -> str:
        """For people."""
        where = "" if self.same_cluster else " (on another number of ranks)"
        return (
            f"\nThe run took {self.measured_ms:.1f} ms a step under {self.method}{where}; data parallel with it is "
            f"predicted at {self.predicted_ms:.1f} ms."
        )


@dataclass(frozen=True)
class Known:
    """What a plan may start from; None where it is not known.

    Args:
        params: Trainable parameters.
        gpus: Ranks.
        per_node: Ranks of a host.
        batch_per_gpu: Samples of a rank in a step.
        compute_ms: Forward and backward of ``compute_samples`` samples, without exchange.
        compute_samples: See there.
        inter_rate: Bytes a second of a node.
        intra_rate: Bytes a second of a rank inside its node.
        inter_latency_us: Of an empty message between nodes.
        intra_latency_us: Inside one.
        accelerator: ``"gpu"`` or ``"cpu"``.
        precision: The Trainer's, where a plan knows it.
        stolen_ns_per_byte: Of computing, for a byte sent.
        contention: Of codecs with computing.
        codecs: What methods cost.
        method: In force.
        step_ms: Of a step.

    """

    params: int | None = None
    gpus: int | None = None
    per_node: int | None = None
    batch_per_gpu: int | None = None
    compute_ms: float | None = None
    compute_samples: float = 1.0
    inter_rate: float | None = None
    intra_rate: float | None = None
    inter_latency_us: float | None = None
    intra_latency_us: float | None = None
    accelerator: str | None = None
    precision: Precision | None = None
    stolen_ns_per_byte: float = 0.0
    contention: float = 1.0
    codecs: tuple[tuple[str, CodecCost], ...] = ()
    method: str = ""
    step_ms: float | None = None

    def compared(self, ranking: Ranking) -> Told | None:
        """Return the run beside its prediction; None where there is none."""
        method = "none" if self.method == "ddp" else self.method
        rows = [row for row in ranking.rows if row.layout.kind == "data" and row.method == method and row.fits]
        if self.step_ms is None or not rows:
            return None
        return Told(self.method, self.step_ms, rows[0].step_ms, rows[0].layout.replicas == self.gpus)


def known_of(path: str) -> Known:
    """Return what a run has measured.

    Args:
        path: A file that ``CommMonitor(report="run.json")`` wrote.

    Raises:
        UsageError: It is no such file.

    """
    try:
        content = read_run(Path(path))
    except RunFileError as error:
        raise UsageError(str(error)) from None
    summary, measured, environment = content.summary, content.measured, dict(content.environment)
    per_node = _per_node(environment.get("ranks", ""))
    channel = _channel(content)
    several = per_node is not None and per_node < summary.world_size
    rate = None if channel is None else channel.bytes_per_second
    latency_us = None if channel is None else channel.latency_ms * 1e3
    devices = environment.get("devices", "")
    profile, precision = measured.profile, environment.get("precision", "")
    samples = measured.samples or 1.0
    known = Known(
        params=sum(measured.numels) or None,
        gpus=summary.world_size,
        per_node=per_node,
        batch_per_gpu=max(1, round(samples)),
        compute_ms=summary.compute_ms if profile is None else profile.forward_ms + profile.backward_ms,
        compute_samples=samples,
        inter_rate=rate if several else None,
        intra_rate=None if several else rate,
        inter_latency_us=latency_us if several else None,
        intra_latency_us=None if several else latency_us,
        accelerator=(None if not devices else "cpu" if devices == "cpu" else "gpu"),
        precision=precision if precision in get_args(Precision) else None,  # type: ignore[arg-type]
        stolen_ns_per_byte=0.0 if channel is None else channel.stolen_ns_per_byte,
        contention=1.0 if profile is None else profile.contention,
        codecs=measured.codecs,
        method=summary.method,
        step_ms=summary.step_ms,
    )
    if known.params is None:
        raise UsageError(f"`{path}` does not tell the parameters of the model: give `--params`, without `--from`.")
    return known


def _per_node(ranks: str) -> int | None:
    """Read ``4 on 2 hosts``."""
    match = re.fullmatch(r"(\d+) on (\d+) hosts?", ranks)
    return int(match[1]) // int(match[2]) if match and int(match[1]) % int(match[2]) == 0 else None


def _channel(content: ReportContent) -> Channel | None:
    """Return what ``auto`` measured, or what the run's own bytes took."""
    if content.measured.link is not None:
        return content.measured.link.reducer
    sent, transfer_ms = content.summary.sent_mb_per_step, content.summary.transfer_ms
    return Channel(sent * 1e9 / transfer_ms, 0.0) if sent and transfer_ms else None
