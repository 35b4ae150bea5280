"""What a layout with a method comes to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_commopt.compression import METHODS, Compression, Uncompressed, method_named
from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.exchange import gradient_link, methods_of
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layout_step import Moved, Work, simulate_layout
from lightning_commopt.planning.layouts import Layout
from lightning_commopt.planning.memory import Memory, memory
from lightning_commopt.planning.validity import not_validated

__all__ = ["COMFORTABLE", "FITS", "MICROBATCHES_PER_STAGE", "Row", "rows_of"]

FITS = 0.9
"""Part of a device's memory that a plan may use: the rest is the driver's, the libraries', and what fragments."""
COMFORTABLE = 0.8
"""While a model takes no more of one device, it is trained data parallel."""
MICROBATCHES_PER_STAGE = 4
"""A pipeline's, so that it waits for a fifth of a step at most."""
_FREE_RATE = 1e21
_UNKNOWN = Moved(*[float("nan")] * 5)


@dataclass(frozen=True)
class Row:
    """A layout with a method, as predicted. What does not fit is not simulated: its times and bytes are NaN.

    Args:
        layout: How ranks divide the work.
        method: Its word.
        samples: Of a pass on one copy of the model: a batch of the data loader, or a microbatch of a pipeline.
        passes: Of a step: accumulated batches, or microbatches.
        memory: Bytes of a rank.
        fits: Whether that is at most nine tenths of a device.
        moved: Time and bytes of a step.
        computing_ms: That a rank computes in a step.
        ideal_ms: A step if all devices did nothing but the model's own operations.
        bubble: Part of a step on a free network in which ranks wait for other stages.
        waiting_ms: Time of a step that the slowest rank costs.
        exposed_ms: Time of a step that the network and the codec cost.
        global_batch: Samples of a step.
        not_validated: Why nobody has compared such a prediction with a measurement; empty where somebody has.
        notes: What speaks against it.

    """

    layout: Layout
    method: str
    samples: int
    passes: int
    memory: Memory
    fits: bool
    moved: Moved
    computing_ms: float
    ideal_ms: float
    bubble: float
    waiting_ms: float
    exposed_ms: float
    global_batch: int
    not_validated: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        """Duration of a step."""
        return self.moved.step_ms

    @property
    def samples_per_second(self) -> float:
        """Of all devices together."""
        return self.global_batch / self.step_ms * 1e3

    @property
    def comm_ratio(self) -> float:
        """Part of a step that the network and the codec cost."""
        return self.exposed_ms / self.step_ms

    @property
    def efficiency(self) -> float:
        """Throughput over that of as many devices that need not talk to each other."""
        return self.ideal_ms / self.step_ms

    @property
    def safety(self) -> str:
        """Class of the method: A a cast, B quantised, C watch your loss; empty for none."""
        if self.method == "zero++":
            return "B"
        return "" if self.method == "none" else METHODS[self.method].loss_safety


class _Planned:
    """The rows of one layout; what does not depend on the method is simulated once."""

    def __init__(self, model: Model, training: Training, cluster: Cluster, layout: Layout, per_copy: int) -> None:
        self.model, self.training, self.cluster, self.layout = model, training, cluster, layout
        self.per_copy = per_copy
        self._free: dict[int, tuple[float, float]] = {}

    @cached_property
    def possible_passes(self) -> list[int]:
        """Numbers of passes in which a copy can do its samples, the best first."""
        divisors = [count for count in range(1, self.per_copy + 1) if self.per_copy % count == 0]
        wanted = MICROBATCHES_PER_STAGE * self.layout.stages if self.layout.stages > 1 else 1
        return [count for count in divisors if count >= wanted] or divisors[-1:]

    def row(self, word: str) -> Row:
        """Return the row of a method, in as few passes as fit."""
        method = None if word == "zero++" else method_named(word)
        for passes in self.possible_passes:
            needed = self.memory(method, passes)
            if needed.total <= FITS * self.cluster.memory:
                break
        work, fits = self.work(passes), needed.total <= FITS * self.cluster.memory
        moved, free_ms, waiting_ms = _UNKNOWN, float("nan"), float("nan")
        if fits:
            moved = simulate_layout(work, method)
            free_ms, waiting_ms = self.free(passes)
        profile = work.profile
        computing_ms = passes * (profile.forward_ms + profile.backward_ms) + profile.optimizer_ms
        plain = replace(work, training=replace(self.training, checkpointing=False)).profile
        return Row(
            layout=self.layout,
            method=word,
            samples=self.per_copy // passes,
            passes=passes,
            memory=needed,
            fits=fits,
            moved=moved,
            computing_ms=computing_ms,
            ideal_ms=passes * (plain.forward_ms + plain.backward_ms) + plain.optimizer_ms,
            bubble=1 - computing_ms / free_ms if self.layout.stages > 1 else 0.0,
            waiting_ms=waiting_ms,
            exposed_ms=max(moved.step_ms - free_ms - waiting_ms, 0.0),
            global_batch=self.training.global_batch,
            not_validated=not_validated(self.cluster, self.layout, word),
            notes=tuple(self.notes(passes)),
        )

    def memory(self, method: Compression | None, passes: int) -> Memory:
        """Return what a rank needs."""
        codec = method or Uncompressed()
        per_node = gradient_link(self.cluster, self.layout, codec).ranks_per_node
        samples = self.per_copy // passes
        return memory(self.model, self.training, self.layout, samples, passes, codec, per_node)

    def work(self, passes: int) -> Work:
        """Return what is to be done in so many passes."""
        return Work(self.model, self.training, self.cluster, self.layout, self.per_copy // passes, passes)

    def free(self, passes: int) -> tuple[float, float]:
        """Return a step on a free network, and what the slowest rank adds to it."""
        if passes not in self._free:
            free = replace(
                self.cluster,
                inter_rate=_FREE_RATE,
                intra_rate=_FREE_RATE,
                inter_latency_ms=0.0,
                intra_latency_ms=0.0,
                stolen_ns_per_byte=0.0,
            )
            even_ms, uneven_ms = (
                simulate_layout(
                    replace(self.work(passes), cluster=replace(free, straggler=slow)), Uncompressed()
                ).step_ms
                for slow in (1.0, self.cluster.straggler)
            )
            self._free[passes] = even_ms, uneven_ms - even_ms
        return self._free[passes]

    def notes(self, passes: int) -> Iterator[str]:
        """Say what speaks against so many passes."""
        if self.layout.stages > 1 and passes < MICROBATCHES_PER_STAGE * self.layout.stages:
            wanted = MICROBATCHES_PER_STAGE * self.layout.stages * self.layout.replicas
            yield f"{passes} microbatches for {self.layout.stages} stages: a global batch of {wanted} would wait less"


def rows_of(model: Model, training: Training, cluster: Cluster, layout: Layout) -> list[Row]:
    """Return the rows of a layout, mildest method first; none where the global batch cannot be shared out.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        layout: How ranks divide the work.

    """
    copies = cluster.devices if layout.kind in ("hsdp", "zero") else layout.replicas
    per_copy, rest = divmod(training.global_batch, copies)
    if rest or not per_copy:
        return []
    planned = _Planned(model, training, cluster, layout, per_copy)
    return [planned.row(word) for word in methods_of(layout)]
