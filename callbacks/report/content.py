"""What a report tells."""

from dataclasses import dataclass

from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report.history import Interval
from lightning_commopt.callbacks.report.traffic import GroupTraffic
from lightning_commopt.measure import Span
from lightning_commopt.tuning import CodecCost, ComputeProfile, Link

__all__ = ["BucketTimes", "Measured", "RecordedSteps", "ReportContent"]


@dataclass(frozen=True)
class BucketTimes:
    """Milliseconds that a bucket takes in a step, on average over ranks and the recorded steps."""

    bucket: int | None
    encode_ms: float
    wait_ms: float
    transfer_ms: float
    decode_ms: float


@dataclass(frozen=True)
class RecordedSteps:
    """The time line of a few steps.

    Args:
        first_step: The first of them.
        ranks: The spans of each rank on one clock, as :func:`~lightning_commopt.measure.aligned` gives them; a span
            ``"step"`` for each whole step.

    """

    first_step: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def steps(self) -> int:
        """How many steps."""
        return sum(span.phase == "step" for span in self.ranks[0])

    def only_last(self) -> "RecordedSteps":
        """Return the last step alone, beginning at 0."""
        cut = []
        for spans in self.ranks:
            step = max((span for span in spans if span.phase == "step"), key=lambda span: span.end_ms)
            cut.append([s for s in spans if s.start_ms >= step.start_ms and s.end_ms <= step.end_ms])
        start_ms = min(span.start_ms for spans in cut for span in spans)
        ranks = tuple(tuple(span.shifted(-start_ms) for span in spans) for spans in cut)
        return RecordedSteps(self.first_step + self.steps - 1, ranks)

    def buckets(self) -> list[BucketTimes]:
        """Return the times of each bucket, in the order in which they are handed over."""
        rounds = self.steps * len(self.ranks)
        exchange = ("encode", "wait", "transfer", "decode")
        sums: dict[int | None, dict[str, float]] = {}
        for span in (span for spans in self.ranks for span in spans if span.phase in exchange):
            times = sums.setdefault(span.bucket, dict.fromkeys(exchange, 0.0))
            times[span.phase] += (span.end_ms - span.start_ms) / rounds
        order = sorted(sums, key=lambda bucket: -1 if bucket is None else bucket)
        return [BucketTimes(bucket, *sums[bucket].values()) for bucket in order]


@dataclass(frozen=True)
class Measured:
    """What other layouts and methods can be predicted from.

    Args:
        numels: Elements of each trainable parameter, in the module's order.
        gradient_bytes: Of all of them.
        samples: Of a rank in an optimizer step; None where batches did not tell.
        link: What ``auto`` measured between ranks; None under other methods, like the next two.
        profile: A step without exchange.
        codecs: Cost of methods, by their words.

    """

    numels: tuple[int, ...] = ()
    gradient_bytes: int = 0
    samples: float | None = None
    link: Link | None = None
    profile: ComputeProfile | None = None
    codecs: tuple[tuple[str, CodecCost], ...] = ()


@dataclass(frozen=True)
class ReportContent:
    """Everything that the page shows.

    Args:
        summary: The numbers of the end table.
        intervals: How the fit went.
        recorded: Time line of a few steps; None where none was recorded.
        kinds: Megabytes (1e6 bytes) that a rank sends in a step, by what they are.
        groups: The same by groups of parameters.
        explanation: What the strategy says is in force, and why.
        decisions: What ``auto`` decided, line by line.
        environment: Name and value.
        measured: What other layouts and methods can be predicted from.

    """

    summary: CommSummary
    intervals: tuple[Interval, ...] = ()
    recorded: RecordedSteps | None = None
    kinds: tuple[tuple[str, float], ...] = ()
    groups: tuple[GroupTraffic, ...] = ()
    explanation: str = ""
    decisions: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    measured: Measured = Measured()
