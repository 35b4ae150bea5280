"""What bounds a run, and what each remedy would gain: pure functions of what was measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_commopt.callbacks.monitor.averages import StepAverages
from lightning_commopt.compression import method_named

__all__ = ["Advice", "Remedy", "Situation", "advise"]

WORTH = 0.1
"""Part of a step below which there is little to win."""
BOUND = 0.3
"""Part of a step from which on it is bound by something: the field's threshold for communication and for idle GPUs."""
BUSY = 0.8
"""Part of the time that a GPU should be busy."""

_MILDEST_FIRST = ("bf16", "int8", "int4")  # those that keep the loss; harsher ones are the user's own decision
_MANY = 1 << 20  # elements: a method's bytes an element, scales included
_STANDS_OUT = 1.05  # times the mean that the slowest rank computes, for it to be blamed
_WIN = 1.05  # what is predicted to gain less is not worth a word


@dataclass(frozen=True)
class Situation:
    """What is in force, as far as advice depends on it.

    Args:
        accumulate: Batches of an optimizer step.
        bucket_mb: Size of a gradient bucket, MB of 2**20 bytes.
        nodes: Nodes.
        ranks_per_node: Ranks on each; 1 where nodes are not equal.
        hierarchical: Whether gradients are reduced inside nodes first.
        automatic: Whether Lightning steps the optimizer; it accumulates no batches for a module that does so itself.

    """

    accumulate: int = 1
    bucket_mb: float = 25.0
    nodes: int = 1
    ranks_per_node: int = 1
    hierarchical: bool = False
    automatic: bool = True


class Remedy(NamedTuple):
    """One thing to do, and how many times as many samples a second it would give."""

    words: str
    gain: float


class Advice(NamedTuple):
    """What bounds a run, and the remedies.

    Args:
        bound_by: ``"communication"``, ``"waiting"``, ``"compute"``, ``"host"`` (a GPU that idles while nobody
            communicates), ``"one process"`` or ``"not measured"``.
        finding: A sentence.
        advice: A sentence.
        remedies: Those that it names, the largest gain first.

    """

    bound_by: str
    finding: str
    advice: str
    remedies: tuple[Remedy, ...] = ()

    @property
    def sentence(self) -> str:
        """Both sentences."""
        return f"{self.finding} {self.advice}"


def advise(averages: StepAverages, method: str, situation: Situation | None = None) -> Advice:
    """Judge the averages of some steps.

    A step of ``T = C + E + W`` (compute, exposed communication, waiting) takes a batch of samples; ``X`` is its
    transfer. How many times as many samples a second a remedy would give:

    - a method that sends ``q`` times the bytes: ``T / (T - min(E, (1 - q) X))``, its codec not counted
    - ``k`` times the batches accumulated, or a batch ``k`` times as large: ``k T / (k C + E + k W)``
    - ``n`` buckets where there was one or two: the exchange may begin while backward runs, which is taken to be half of
      ``C``: ``T / (T - min(E (1 - 1 / n), C / 2))``
    - reducing inside nodes of ``L`` ranks first: ``T / (T - min(E, (1 - 1 / L) X))``

    Args:
        averages: What was measured.
        method: The method in force.
        situation: What else is in force.

    """
    situation = situation or Situation()
    if averages.step_ms is None:
        return Advice("not measured", "Too few steps to say what bounds this run.", "Train for some dozen steps.")
    busy = averages.gpu_busy_ratio
    if len(averages.by_rank) < 2:
        return _host(busy) or Advice(
            "one process", "One process exchanges nothing.", "Add processes to see what they cost."
        )
    comm, waiting = averages.comm_ratio or 0.0, averages.waiting_ratio or 0.0
    share, name = max((comm, "communication"), (waiting, "waiting"))
    if share < WORTH:
        return _host(busy) or Advice(
            "compute",
            f"This run is bound by compute: {_percent(averages.scaling_efficiency)} of a step.",
            "There is nothing to win: exchanging gradients faster would gain next to nothing. Leave the method as it "
            "is.",
        )
    strength = "is bound by" if share >= BOUND else "loses time to"
    if name == "waiting":
        return Advice(
            name, f"This run {strength} waiting for slower ranks: {_percent(share)} of a step.", _who_is_slow(averages)
        )
    remedies = tuple(sorted(_remedies(averages, method, situation), key=lambda remedy: -remedy.gain))
    told = "; ".join(f"{words} ({gain:.1f}x)" for words, gain in remedies)
    return Advice(
        name,
        f"This run {strength} communication: {_percent(share)} of a step, with no compute left to hide it.",
        f"Predicted gains in samples a second: {told}." if told else "No method or batch at hand would gain much.",
        remedies,
    )


def _host(busy: float | None) -> Advice | None:
    """Say that a GPU idles though nobody communicates; None where it does not, or nobody knows."""
    if busy is None or busy >= BUSY:
        return None
    strength = "idles for" if busy <= 1 - BOUND else "is not busy for"
    return Advice(
        "host",
        f"The GPU {strength} {_percent(1 - busy)} of the time, and not because of communication.",
        "Look at data loading (`num_workers`, `pin_memory`), logging and `.item()` in every batch, or enlarge the "
        "batch.",
    )


def _who_is_slow(averages: StepAverages) -> str:
    """Name the rank that others wait for, where one stands out."""
    compute = [times.compute_ms for times in averages.by_rank]
    if max(compute) < _STANDS_OUT * sum(compute) / len(compute):
        return (
            "No rank computes much longer than the others on average, so they are slow in turn: look at data loading, "
            "the length of samples, and logging with `sync_dist`; no compression helps."
        )
    return (
        f"Rank {averages.slowest_rank} computes longest. Look at its data loading, its machine and the length of its "
        "samples; no compression helps."
    )


def _remedies(averages: StepAverages, method: str, situation: Situation) -> Iterator[Remedy]:
    """Yield what would gain something."""
    step, compute = averages.step_ms or 0.0, averages.compute_ms or 0.0
    exposed, waiting = averages.exposed_comm_ms or 0.0, averages.waiting_ms or 0.0
    transfer = exposed if averages.transfer_ms is None else averages.transfer_ms
    for word, part in _harsher(averages, method):
        saved = min(exposed, (1 - part) * transfer)
        if step / (step - saved) >= _WIN:
            yield Remedy(f"`{word}` instead of `{method}`", step / (step - saved))
            if exposed - saved < WORTH * (step - saved):
                break  # the mildest that hides communication
    if situation.nodes > 1 and situation.ranks_per_node > 1 and not situation.hierarchical:
        saved = min(exposed, (1 - 1 / situation.ranks_per_node) * transfer)
        yield Remedy("`hierarchy='auto'`, which reduces inside nodes first", step / (step - saved))
    dense_mb = (averages.dense_mb_per_step or 0.0) * 1e6 / 2**20
    if (averages.overlap_ratio or 0.0) < 0.2 and 1 < dense_mb <= 2 * situation.bucket_mb:
        saved = min(exposed * (1 - 1 / dense_mb), compute / 2)
        if step / (step - saved) >= _WIN:
            yield Remedy("`bucket_cap_mb=1`, so that the exchange begins during backward", step / (step - saved))
    accumulating = [(f"`accumulate_grad_batches={times * situation.accumulate}`", times) for times in (2, 4)]
    for words, times in (
        *(accumulating if situation.automatic else ()),
        ("a batch twice as large, where memory allows", 2),
    ):
        gain = times * step / (times * (compute + waiting) + exposed)
        if gain >= _WIN:
            yield Remedy(words, gain)


def _harsher(averages: StepAverages, method: str) -> Iterator[tuple[str, float]]:
    """Yield methods that send less than the one in force, mildest first, and the part of its bytes that they send."""
    if averages.compression_ratio is None:
        return
    known = method in _MILDEST_FIRST
    now = _bytes_an_element(method) if known else 4 / averages.compression_ratio  # under `auto` of several methods
    milder = _MILDEST_FIRST.index(method) + 1 if known else 0
    for word in _MILDEST_FIRST[milder:]:
        part = _bytes_an_element(word) / now
        if part < 0.9:
            yield word, part


def _bytes_an_element(word: str) -> float:
    return method_named(word).wire_bytes(_MANY) / _MANY


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.0f} %"
