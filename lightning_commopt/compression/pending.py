"""Training state whose update waits until the optimizer step is known to be applied."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commopt.compression.layout import BucketLayout, gaps_between

__all__ = ["Parts", "PendingBuffer", "Span", "spans_of"]

Parts = dict[str, list[tuple[int, Tensor]]]
"""State by parameter: ``{name: [(first element, flat fp32 CPU tensor), ...]}``."""


@dataclass(frozen=True)
class Span:
    """A stretch of one parameter's state inside a buffer.

    Args:
        name: The parameter.
        index: Its position in the bucket.
        buffer: The elements in the buffer.
        first: The first of these elements, counted inside the parameter's flattened state.

    """

    name: str
    index: int
    buffer: slice
    first: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.buffer.stop - self.buffer.start)


def spans_of(layout: BucketLayout, start: int, numel: int) -> tuple[Span, ...]:
    """Return the stretches of compressed parameters in ``numel`` packed elements from ``start`` on."""
    spans = []
    for segment in layout.compressed:
        first, last = max(segment.packed.start, start), min(segment.packed.stop, start + numel)
        if first < last:
            buffer = slice(first - start, last - start)
            spans.append(Span(segment.parameter.name, segment.index, buffer, first - segment.packed_offset))
    return tuple(spans)


class PendingBuffer:
    """One fp32 buffer of state, by parameter.

    Where an optimizer step may yet be skipped, what a round writes is *pending*, in a shadow buffer of its own, and
    becomes final parameter by parameter in :meth:`commit`. A further round before that continues from the pending
    state.

    Args:
        spans: The parameters in the buffer, ascending.
        numel: Elements in the buffer, padding included.
        device: Where the buffer lives.
        shadow: Whether a step may be skipped.

    """

    def __init__(self, spans: Sequence[Span], numel: int, device: torch.device, shadow: bool) -> None:
        self.spans = tuple(spans)
        self.final = torch.zeros(numel, device=device)
        self.pending = torch.zeros(numel, device=device) if shadow else self.final
        self._open = [False] * len(self.spans)  # which parameters' pending state is valid and not yet final
        self._before: dict[int, Tensor] = {}  # their pending state before the running round
        self._written = False  # whether the running round wrote anything
        self._gaps = gaps_between([span.buffer for span in self.spans], numel)

    @property
    def shadow(self) -> bool:
        """Whether pending state has a buffer of its own."""
        return self.pending is not self.final

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.final.nbytes * (2 if self.shadow else 1)

    def keep_shadow(self) -> None:
        """From now on, give pending state a buffer of its own. Call it between rounds."""
        if not self.shadow:
            self.pending = torch.zeros_like(self.final)
            self._written = False

    def update(self, write: Callable[[Span, Tensor, Tensor], object]) -> Tensor:
        """Write the pending state of every parameter and return the buffer; :meth:`round_done` must follow.

        Args:
            write: ``write(span, latest, out)`` writes one parameter's new state into ``out``; ``latest`` is its state
                before, and may be the same memory.

        """
        for i, span in enumerate(self.spans):
            if self._open[i] and self.shadow:
                self._before[i] = self.pending[span.buffer].clone()
            latest = self.pending if self._open[i] else self.final
            write(span, latest[span.buffer], self.pending[span.buffer])
        for gap in self._gaps:
            self.pending[gap].zero_()
        self._written = True
        return self.pending

    @property
    def settled(self) -> bool:
        """Whether nothing is pending, so that the latest state of all parameters is the final one."""
        return not any(self._open)

    def update_all(self, write: Callable[[Tensor, Tensor], object]) -> Tensor:
        """Do what :meth:`update` does for all parameters at once, where the state is :attr:`settled`.

        Args:
            write: ``write(latest, out)`` writes the new state; both are whole buffers, and may be the same.

        """
        assert self.settled
        write(self.final, self.pending)
        for gap in self._gaps:
            self.pending[gap].zero_()
        self._written = True
        return self.pending

    def round_done(self, usable: Sequence[bool] | Tensor) -> None:
        """Take back what the round wrote for parameters that its result did not reach.

        Args:
            usable: For each parameter of the bucket, whether some rank used it and it was finite. A bool tensor on the
                device is not waited for.

        """
        if not self.shadow or not self._written:
            return
        if isinstance(usable, Tensor):
            for i, span in enumerate(self.spans):
                before = self._before.get(i, self.final[span.buffer])
                part = self.pending[span.buffer]
                torch.where(usable[span.index], part, before, out=part)
            self._open = [True] * len(self.spans)
        else:
            for i, span in enumerate(self.spans):
                if not usable[span.index] and i in self._before:
                    self.pending[span.buffer].copy_(self._before[i])
                else:
                    self._open[i] = bool(usable[span.index])
        self._before.clear()
        self._written = False

    def latest(self, position: int) -> Tensor:
        """Return the state of the parameter of span number ``position``, as the next round finds it."""
        buffer = self.pending if self._open[position] else self.final
        return buffer[self.spans[position].buffer]

    def commit(self, applied: bool | Tensor, names: frozenset[str] | None) -> None:
        """Make pending state final, or forget it.

        Args:
            applied: Whether the optimizer stepped. A 0-d bool tensor on the device is not waited for.
            names: The parameters whose optimizer it was; None for all.

        """
        mine = [i for i, span in enumerate(self.spans) if self._open[i] and (names is None or span.name in names)]
        for i in mine:
            self._open[i] = False
        if isinstance(applied, Tensor):
            for part in (self.spans[i].buffer for i in mine):
                torch.where(applied, self.pending[part], self.final[part], out=self.final[part])
        elif applied and len(mine) == len(self.spans):
            self.final, self.pending = self.pending, self.final
        elif applied:
            for part in (self.spans[i].buffer for i in mine):
                self.final[part].copy_(self.pending[part])

    def discard(self, thrown_away: Callable[[str], bool | Tensor]) -> None:
        """Forget the pending state of parameters whose last result was thrown away.

        Args:
            thrown_away: By the parameter's name. A 0-d bool tensor on the device is not waited for.

        """
        for i, span in enumerate(self.spans):
            gone = self._open[i] and thrown_away(span.name)
            if isinstance(gone, Tensor):
                part = self.pending[span.buffer]
                torch.where(gone, self.final[span.buffer], part, out=part)
            elif gone:
                self._open[i] = False

    def clear(self, names: Collection[str]) -> None:
        """Zero the state of some parameters (spoiled by a gradient that was not finite, with no shadow)."""
        for span in self.spans:
            if span.name in names:
                self.final[span.buffer].zero_()

    def load(self, parts: Mapping[str, Sequence[tuple[int, Tensor]]]) -> None:
        """Overwrite the final state of the elements that ``parts`` names."""
        for span in self.spans:
            target = self.final[span.buffer]
            for first, values in parts.get(span.name, ()):
                low = max(first, span.first)
                high = min(first + values.numel(), span.first + span.numel)
                if low < high:
                    target[low - span.first : high - span.first] = values[low - first : high - first].to(target)

    def parts(self) -> Parts:
        """Return a copy of the final state."""
        return {s.name: [(s.first, self.final[s.buffer].detach().to("cpu", copy=True))] for s in self.spans}
