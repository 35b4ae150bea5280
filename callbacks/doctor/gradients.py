"""Check 3: the gradients of each rank, before they are exchanged."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.finding import Finding

__all__ = ["GradientCheck"]

_APART = 10.0
_FLAT_STEPS = 3


@dataclass
class _Seen:
    """What one rank saw.

    Args:
        totals: Norm of the whole gradient, by step.
        largest: Largest norm of each parameter, by name; 0 where it had no gradient.
        not_finite: Steps (from 1) with a gradient that is not finite, and the parameter where it began.

    """

    totals: list[float] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    not_finite: list[tuple[int, str]] = field(default_factory=list)


class GradientCheck(Check):
    """Norm a rank, values that are not finite, parameters without a gradient, norms that stay at 0.

    Norms are taken by hooks on the parameters, which see a rank's own gradient; under accumulation the largest of the
    accumulated ones.
    """

    name = "gradients"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._handles: list[RemovableHandle] = []
        self._names: list[str] = []
        self._current: dict[int, Tensor] = {}
        self._order: list[int] = []
        self._steps: list[tuple[dict[int, Tensor], list[int], Tensor | float | None]] = []

    @override
    def train_start(self) -> None:
        with self.run.view.whole_parameters() as named:
            for name, parameter in named:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._hook(len(self._names))))
                    self._names.append(name)

    def _hook(self, index: int) -> Any:
        def note(gradient: Tensor) -> None:
            values = gradient.detach()
            values = values.coalesce().values() if values.is_sparse else values
            norm = torch.linalg.vector_norm(values, dtype=torch.float64 if not values.is_complex() else None)
            if index in self._current:
                self._current[index] = torch.maximum(self._current[index], norm)
            else:
                self._current[index] = norm
                self._order.append(index)

        return note

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        if steps:
            self._steps.append((self._current, self._order, self.run.view.loss_scale()))
            self._current, self._order = {}, []

    @override
    def findings(self) -> list[Finding]:
        ranks = self.run.all_gather(self._summary())
        steps = len(ranks[0].totals)
        if not steps:
            return [self.unchecked("no optimizer step was taken.")]
        found = [*self._not_finite(ranks), *self._flat(ranks), *self._zero(ranks), *self._apart(ranks)]
        norms = " / ".join(f"{_mean(seen.totals):.3g}" for seen in ranks)
        return found or [self.fine(f"mean norm by rank: {norms}; all finite, every parameter has a gradient")]

    @override
    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _summary(self) -> _Seen:
        """Bring everything to the host, in one go a step."""
        seen = _Seen(largest=dict.fromkeys(self._names, 0.0))
        for step, (norms, order, scale) in enumerate(self._steps, 1):
            scaled = torch.stack([norms[i] for i in order]).tolist() if order else []
            by = 1.0 if scale is None else float(scale)
            values = {self._names[i]: value / by for i, value in zip(order, scaled, strict=True)}
            bad = [name for name, value in values.items() if not math.isfinite(value)]
            seen.not_finite += [(step, bad[0])] if bad else []
            seen.totals.append(math.hypot(*values.values()))
            for name, value in values.items():
                seen.largest[name] = max(seen.largest[name], value if math.isfinite(value) else math.inf)
        return seen

    def _not_finite(self, ranks: Sequence[_Seen]) -> Iterator[Finding]:
        scaled = any(scale not in (None, 1.0) for *_, scale in self._steps)
        for rank, seen in enumerate(ranks):
            few = scaled and 2 * len(seen.not_finite) <= len(seen.totals)  # a scaler looks for its scale that way
            if not seen.not_finite or few:
                continue
            step, name = seen.not_finite[0]
            yield self.found(
                f"the gradient of `{name}` on rank {rank} is NaN or infinite in step {step} "
                f"({len(seen.not_finite)} of {len(seen.totals)} steps)",
                "look at the batch and at the operations of that module (log, sqrt or a division at 0); run once with "
                "`Trainer(detect_anomaly=True)`; `CommOptStrategy(nonfinite='error')` stops there",
                rank=rank,
                number=step,
            )

    def _flat(self, ranks: Sequence[_Seen]) -> Iterator[Finding]:
        for rank, seen in enumerate(ranks):
            if (flat := _longest_zero_run(seen.totals)) >= _FLAT_STEPS:
                yield self.found(
                    f"the gradient of rank {rank} is 0 for {flat} steps in a row",
                    "look whether its loss depends on the parameters (`detach`, an empty mask, a loss weight of 0)",
                    rank=rank,
                    number=flat,
                )

    def _zero(self, ranks: Sequence[_Seen]) -> Iterator[Finding]:
        if any(not any(seen.totals) for seen in ranks):
            return  # said above
        zero = [name for name in ranks[0].largest if not any(seen.largest.get(name, 0.0) for seen in ranks)]
        if zero:
            some = ", ".join(f"`{name}`" for name in zero[:3]) + ", ..." * (len(zero) > 3)
            yield self.found(
                f"{len(zero)} of {len(ranks[0].largest)} parameters had no gradient but 0 on any rank: {some}",
                "use them in `training_step`, freeze them (`requires_grad_(False)`), or look for an activation that is "
                "always off",
                number=len(zero),
            )

    def _apart(self, ranks: Sequence[_Seen]) -> Iterator[Finding]:
        means = [_mean(seen.totals) for seen in ranks]
        for rank, mean in enumerate(means):
            others = median(means[:rank] + means[rank + 1 :] or [mean])
            if mean > _APART * others > 0:
                yield self.found(
                    f"the gradient of rank {rank} is {mean / others:.0f} times as large as the others' "
                    f"({mean:.3g} to {others:.3g})",
                    "compare its data with the others' (scale, labels, empty samples); it decides every step alone",
                    rank=rank,
                    number=mean / others,
                )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _longest_zero_run(values: Sequence[float]) -> int:
    longest = run = 0
    for value in values:
        run = run + 1 if value == 0 else 0
        longest = max(longest, run)
    return longest
