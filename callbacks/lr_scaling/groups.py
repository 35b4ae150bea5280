"""Learning rates of parameter groups: what a schedule gives, and that times a scale, which is used.

Both live in the group itself, so that they go into checkpoints together, whatever strategy writes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ScheduleSteps", "rescale", "schedule_lr", "unscale", "unscaled"]

_UNSCALED, _SCALE = "unscaled_lr", "lr_scale"
_Group = dict[str, Any]


def rescale(optimizer: Optimizer, scale: float) -> list[float]:
    """Let each group use ``scale`` times what the schedule gives.

    Returns:
        Rates that other code wrote since the last time; each is now taken as what the schedule gives.

    """
    written = [float(group["lr"]) for group in optimizer.param_groups if _SCALE in group and not _as_left(group)]
    for group in optimizer.param_groups:
        _apply(group, schedule_lr(group), scale)
    return written


def schedule_lr(group: _Group) -> float:
    """Return what the schedule gives for a group, unscaled."""
    return float(group[_UNSCALED] if _SCALE in group and _as_left(group) else group["lr"])


def unscale(optimizer: Optimizer) -> None:
    """Give a group what the schedule gives, and forget the scale."""
    for group in optimizer.param_groups:
        if _SCALE in group:
            _write(group, schedule_lr(group))
            del group[_UNSCALED], group[_SCALE]


@contextmanager
def unscaled(optimizer: Optimizer) -> Iterator[None]:
    """Show unscaled rates inside; what is written there is what the schedule gives from now on."""
    scales = [(group, group[_SCALE]) for group in optimizer.param_groups if _SCALE in group]
    for group, _ in scales:
        _write(group, schedule_lr(group))
        del group[_SCALE]  # a nested call finds nothing to do
    try:
        yield
    finally:
        for group, scale in scales:
            _apply(group, float(group["lr"]), scale)


class ScheduleSteps:
    """Lets schedulers work on unscaled rates, whoever steps them, until :meth:`restore`.

    A scheduler's class is replaced by a subclass of it: a wrapped ``step`` in the object itself would become part of
    its state dict.
    """

    def __init__(self) -> None:
        self._classes: list[tuple[Any, type]] = []

    def wrap(self, scheduler: Any) -> None:
        """Put a scheduler's steps inside :func:`unscaled`. No effect the second time."""
        if all(scheduler is not known for known, _ in self._classes):
            self._classes.append((scheduler, type(scheduler)))
            scheduler.__class__ = _on_unscaled_rates(type(scheduler))

    def restore(self) -> None:
        """Give all schedulers their class back."""
        while self._classes:
            scheduler, own = self._classes.pop()
            scheduler.__class__ = own


def _on_unscaled_rates(own: Any) -> type:
    """Return a subclass that looks the same."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unscaled(self.optimizer):
            return own.step(self, *args, **kwargs)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), {"__slots__": (), "step": step, **names})


def _apply(group: _Group, unscaled_lr: float, scale: float) -> None:
    group[_UNSCALED], group[_SCALE] = unscaled_lr, scale
    _write(group, unscaled_lr * scale)


def _as_left(group: _Group) -> bool:
    """Whether a group's rate is the one that we wrote."""
    lr, ours = group["lr"], group[_UNSCALED] * group[_SCALE]
    return bool(lr.item() == torch.tensor(ours, dtype=lr.dtype).item() if isinstance(lr, Tensor) else lr == ours)


def _write(group: _Group, lr: float) -> None:
    """Set a rate; a tensor is filled, since compiled and captured optimizers hold on to it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
