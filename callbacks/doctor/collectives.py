"""Check 5: which collectives a step has, from where, and which of them could go."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.flight_record import last_record, records_since
from lightning_commopt.callbacks.doctor.sites import Site, site_of
from lightning_commopt.callbacks.monitor.replicas import bits_hash

__all__ = ["CollectiveCheck"]

_STEPS = 3
_WARM_UP = 3  # DDP builds its buckets in the first steps
_SMALL = 64  # elements: some numbers, not data


class CollectiveCheck(Check):
    """Every collective of some steps by kind and call site, from torch's flight recorder.

    Surplus are: values logged with ``sync_dist`` in every step, buffers that are broadcast and never change, the map of
    used parameters where all are used, several exchanges of gradients for one optimizer step, and barriers and small
    collectives of the user in every step.
    """

    name = "collectives"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._begin_after = _WARM_UP if run.options.steps >= _WARM_UP + _STEPS else 1
        self._began: int | None = None  # after so many steps
        self._record: int | None = None
        self._sites: Counter[Site] | None = None
        self._steps = self._rounds = self._encoded = 0
        self._buffers: dict[str, int] = {}
        self._constant_buffers = False
        self._used: set[int] = set()  # in the running backward
        self._always_used = True
        self._handles: list[RemovableHandle] = []
        self._why = "the fit had too few steps: this check takes two."

    @override
    def after_backward(self) -> None:
        ddp = self.run.trainer.strategy.model
        if self._counting:
            trainable = (id(p) for p in self.run.module.parameters() if p.requires_grad)
            self._always_used = self._always_used and self._used.issuperset(trainable)
            self._used.clear()
        if self._counting and isinstance(ddp, DistributedDataParallel) and ddp.require_backward_grad_sync:
            self._rounds += 1

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        done = self.run.steps_done
        if not steps or self.run.world == 1:
            return
        if self._began is None and done >= self._begin_after:
            self._begin()
        elif self._counting and done >= (self._began or 0) + _STEPS:
            self._end()

    @override
    def findings(self) -> list[Finding]:
        if self.run.world == 1:
            return [self.unchecked("one process: it has no collectives.")]
        if self._counting and self.run.steps_done > (self._began or 0):
            self._end()
        self._always_used = all(self.run.all_gather(self._always_used))
        answers = None if self._sites is None else [*self._surplus(), self.fine(self._summary(self._sites))]
        ranks = self.run.all_gather((answers, self._why))
        missing = [why for answer, why in ranks if answer is None]
        return [self.unchecked(missing[0])] if missing else ranks[0][0] or []

    @override
    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @property
    def _counting(self) -> bool:
        return self._began is not None and self._steps == 0

    def _begin(self) -> None:
        self._began, self._record = self.run.steps_done, last_record()
        self._buffers, self._encoded = self._buffer_hashes(), self._bucket_exchanges()
        for parameter in self.run.module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._note_use, id(parameter))))

    def _note_use(self, parameter: int, _: Tensor) -> None:
        """Note that a backward reached a parameter on this rank."""
        self._used.add(parameter)

    def _end(self) -> None:
        """Take down the collectives since the beginning."""
        self._steps = self.run.steps_done - (self._began or 0)
        self.close()
        self._constant_buffers = self._buffers == self._buffer_hashes()
        self._encoded = self._bucket_exchanges() - self._encoded
        if self._record is None:
            self._why = "torch's flight recorder is off or older than torch 2.7: set `TORCH_FR_BUFFER_SIZE=2000`."
        elif (records := records_since(self._record)) is None:
            self._why = "steps have more collectives than torch's flight recorder keeps: raise `TORCH_FR_BUFFER_SIZE`."
        else:
            self._sites = Counter(site for record in records if (site := site_of(record)) is not None)

    def _bucket_exchanges(self) -> int:
        """Return how many buckets were exchanged by our own path, which the flight recorder sees only in part."""
        return self.run.view.encoded_exchanges()

    def _buffer_hashes(self) -> dict[str, int]:
        return {name: bits_hash(buffer) for name, buffer in self.run.module.named_buffers()}

    def _summary(self, sites: Counter[Site]) -> str:
        """All kinds, a step."""
        by_kind: Counter[str] = Counter()
        for site, count in sites.items():
            by_kind[site.kind] += count
        parts = [f"{kind} {count / self._steps:.3g}" for kind, count in sorted(by_kind.items())]
        parts += [f"encoded buckets {self._encoded / self._steps:.3g}"] if self._encoded else []
        return f"collectives an optimizer step: {', '.join(parts) or 'none'}"

    # ---- what could go ----------------------------------------------------------------------------------------------

    def _surplus(self) -> Iterator[Finding]:
        yield from self._logged()
        yield from self._of_user()
        if (number := self._per_step("buffers")) and self._constant_buffers:
            yield self._could_go(
                number, "buffers are broadcast {} times a step and never change", "pass `broadcast_buffers=False`"
            )
        if (number := self._per_step("used parameters")) and self._always_used:
            yield self._could_go(
                number,
                "`find_unused_parameters=True` costs {} collectives a step and a walk over the graph, and all "
                "parameters were used in every backward pass",
                "leave it out",
            )
        number = self._rounds / self._steps
        if number > 1 and len(self.run.trainer.optimizers) == 1:
            yield self.found(
                f"gradients are exchanged {number:g} times for one optimizer step",
                "put all backward passes of a step but the last into `with self.trainer.strategy.model.no_sync():`; "
                f"that saves {1 - 1 / number:.0%} of the gradients' bytes",
                number=number,
            )

    def _logged(self) -> Iterator[Finding]:
        places: Counter[str] = Counter()
        for site, count in self._frequent("logging"):
            places[site.place] += count
        for place, count in places.items():
            yield self._could_go(
                count / self._steps,
                f"`self.log(..., sync_dist=True)` at {place} costs {{}} collectives in every step",
                "log it with `on_step=False, on_epoch=True`, or without `sync_dist`",
            )

    def _of_user(self) -> Iterator[Finding]:
        for site, count in self._frequent("user"):
            barrier = site.operation == "barrier"
            if barrier or site.elements <= _SMALL:
                what = "carries nothing" if barrier else f"carries {site.elements} numbers"
                yield self._could_go(
                    count / self._steps,
                    f"`{site.operation}` at {site.place} runs {{}} times a step and {what}",
                    "if training does not depend on it, remove it, or do it every 50 steps",
                )

    def _could_go(self, number: float, message: str, remedy: str) -> Finding:
        """A finding with its saving; ``{}`` in the message is the number."""
        saving = f"saves {number:.3g} collectives a step, in which all ranks wait for each other"
        return self.found(message.format(f"{number:.3g}"), f"{remedy}: {saving}", number=number)

    def _frequent(self, kind: str) -> list[tuple[Site, int]]:
        """Return what a rank does in every step."""
        return [(s, count) for s, count in (self._sites or {}).items() if s.kind == kind and count >= self._steps]

    def _per_step(self, kind: str) -> float:
        return sum(count for site, count in (self._sites or {}).items() if site.kind == kind) / self._steps
