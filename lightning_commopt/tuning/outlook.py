"""What ``auto`` would choose for a model of some size, by how long the model computes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch.nn import Parameter

from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning.cost_model import ComputeProfile
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.measurements import Measurements, Ways
from lightning_commopt.tuning.policy import AutoPolicy
from lightning_commopt.tuning.state import AutoState

__all__ = ["MOST_PARAMETERS", "Outlook", "evidence_for", "outlook"]

MOST_PARAMETERS = 10**12
"""Largest model of an outlook: tensors of more would take all the memory, and time, that a machine has."""

_ROWS, _COLUMNS = 1024, 512  # of a parameter
_MOST_TENSORS = 2000
_STEPS_A_DECADE = 40
_STEPS_AT_FIRST = 8
_MOST_MS = 1e7


@dataclass(frozen=True)
class Outlook:
    """What would be chosen over a range of models.

    Args:
        from_ms: A step without exchange takes as long as this, or longer.
        to_ms: But less than this; None: there is no end, or ``from_ms`` alone was asked for.
        method: What would be chosen then; ``"none"``: DDP's own reducer.
        dense_ms: A step under DDP's own reducer at the beginning of the range, predicted.
        step_ms: A step under the method there, predicted.

    """

    from_ms: float
    to_ms: float | None
    method: str
    dense_ms: float
    step_ms: float


def evidence_for(
    parameters: int, control: ControlGroup, ways: Ways, device: torch.device
) -> tuple[Link, Evidence | None]:
    """Measure links, and codecs where there are parameters to send. A collective.

    Args:
        parameters: Elements that have a gradient, in matrices of 1024 x 512, or of more columns where these would be
            very many; 0: only the links.
        control: Agreement between ranks.
        ways: The groups.
        device: Where gradients would be.

    """
    columns = max(_COLUMNS, parameters // (_ROWS * _MOST_TENSORS))
    matrices, rest = divmod(parameters, _ROWS * columns)
    shapes = [(_ROWS, columns)] * matrices + [(1, rest)] * (rest > 0)
    tensors = {f"{i}": Parameter(torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)}
    measurements = Measurements(AutoPolicy(), control, ways, device, tensors, None, lambda: None)
    link = measurements.probe_link()
    if not parameters:
        return link, None
    measurements.compute = _profile(0.0)
    measurements.probe_codecs()
    return link, measurements.evidence()


def outlook(evidence: Evidence, step_ms: float | None = None) -> list[Outlook]:
    """Return what would be chosen, by how long a step without exchange takes. Of that, a third comes before backward.

    Args:
        evidence: As :func:`evidence_for` gives it.
        step_ms: How long; None for all there are.

    """
    if step_ms is not None:
        return [_chosen(evidence, step_ms)]
    times = [0.0, *_grid()]
    chosen = cache(lambda place: _chosen(evidence, times[place]))
    looked_at = [*range(0, len(times) - 1, _STEPS_AT_FIRST), len(times) - 1]
    begins = [0, *(place for ends in pairwise(looked_at) for place in _changes(chosen, *ends))]
    return [
        replace(chosen(place), to_ms=None if after is None else times[after])
        for place, after in zip(begins, [*begins[1:], None], strict=True)
    ]


def _changes(chosen: Callable[[int], Outlook], low: int, high: int) -> Iterator[int]:
    """Yield the places above ``low`` and up to ``high`` where another method begins; none where the ends agree."""
    if chosen(low).method == chosen(high).method:
        return
    if high - low == 1:
        yield high
        return
    middle = (low + high) // 2
    yield from _changes(chosen, low, middle)
    yield from _changes(chosen, middle, high)


def _chosen(evidence: Evidence, step_ms: float) -> Outlook:
    contention = evidence.profile.contention
    told = AutoState().chosen(AutoPolicy(), replace(evidence, profile=_profile(step_ms, contention)), 0).decisions[-1]
    return Outlook(step_ms, None, told.choice.method, told.dense_ms, told.predicted_ms)


def _profile(step_ms: float, contention: float = 1.0) -> ComputeProfile:
    return ComputeProfile(step_ms / 3, step_ms * 2 / 3, 0.0, (), contention)


def _grid() -> Iterator[float]:
    ms = 1.0
    while ms < _MOST_MS:
        yield ms
        ms *= 10 ** (1 / _STEPS_A_DECADE)
