"""What the last stage logs and returns, as every rank of the pipeline is to log and return it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.microbatches import Microbatch, merge_outputs

__all__ = ["Logged", "StepRecorder", "log_again"]

_SUMS, _MAXIMA, _MINIMA = ("sum", torch.sum, sum), ("max", torch.max, max), ("min", torch.min, min)
_LOG = signature(pl.LightningModule.log)


@dataclass
class Logged:
    """One call of ``self.log``.

    Args:
        name: Its key.
        value: Of the whole batch; None for a metric that has no value yet.
        options: Further arguments.
        metric: Name of the torchmetrics module that was logged, if it was one.

    """

    name: str
    value: Any
    options: dict[str, Any]
    metric: str | None = None


@dataclass
class _Calls:
    options: dict[str, Any]
    metric: str | None
    values: dict[int, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)
    is_loss: bool = False


class StepRecorder:
    """Records one step of the user on the last stage, by microbatch.

    Args:
        module: The model.
        parts: The microbatches.
        scale: Factor on the loss to run backward on; None for a step without backward.
        summed: Whether the loss is a sum over samples, not a mean.

    """

    def __init__(
        self, module: "pl.LightningModule", parts: Sequence[Microbatch], scale: Tensor | float | None, summed: bool
    ) -> None:
        self._module, self._parts, self._scale, self._summed = module, parts, scale, summed
        self._metrics = {id(m): name for name, m in module.named_modules() if isinstance(m, Metric)}
        self._calls: dict[str, _Calls] = {}
        self._outputs: dict[int, Any] = {}

    def log_of(self, microbatch: int, last: bool) -> Callable[..., None]:
        """Return what stands for ``self.log`` during a microbatch."""

        def log(*args: Any, **kwargs: Any) -> None:
            if last:
                self._record(microbatch, dict(_LOG.bind(self._module, *args, **kwargs).arguments))

        return log

    def returned(self, microbatch: int, output: Any) -> Tensor | None:
        """Keep what the step returned, and give the loss to run backward on."""
        detached = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, output)
        self._outputs[microbatch] = detached
        if self._scale is None:
            return None
        loss = output.get("loss") if isinstance(output, dict) else output
        for calls in self._calls.values():
            calls.is_loss |= calls.given.pop(microbatch, None) is loss
        if not isinstance(loss, Tensor):
            raise PipelineError(
                f"`training_step` returned `{type(output).__name__}` without a loss: return a loss for every "
                "microbatch, multiplied by zero where it is to be skipped."
            )
        weight = 1.0 if self._summed else self._parts[microbatch].share
        scaled: Tensor = loss * (self._scale * weight)
        return scaled

    def logged(self) -> list[Logged]:
        """Return the calls of ``self.log``, their values put together over microbatches."""
        return [Logged(name, *self._merged(calls), calls.metric) for name, calls in self._calls.items()]

    def output(self) -> Any:
        """Return what the step returned, put together over microbatches."""
        outputs = [self._outputs[i] for i in sorted(self._outputs)]
        return merge_outputs(outputs, self._parts, summed=self._summed and self._scale is not None)

    def _record(self, microbatch: int, arguments: dict[str, Any]) -> None:
        arguments.pop("self")
        name, value = arguments.pop("name"), arguments.pop("value")
        metric = self._metrics.get(id(value))
        calls = self._calls.setdefault(name, _Calls(arguments, metric))
        if isinstance(value, Metric):
            value = value._forward_cache
        calls.given[microbatch] = value
        calls.values[microbatch] = value.detach().clone() if isinstance(value, Tensor) else value
        calls.rows[microbatch] = arguments.get("batch_size") or self._parts[microbatch].rows

    def _merged(self, calls: _Calls) -> tuple[Any, dict[str, Any]]:
        order = sorted(calls.values)
        rows = [calls.rows[i] for i in order]
        options = calls.options | {"batch_size": sum(rows)}
        values = [calls.values[i] for i in order]
        if any(value is None for value in values):
            return None, options
        stacked = torch.stack([torch.as_tensor(value).double() for value in values])
        how = options.get("reduce_fx", "mean")  # over batches; within one, it is the best guess
        if calls.is_loss:
            how = "sum" if self._summed else "mean"
        if how in _SUMS:
            merged = stacked.sum(0)
        elif how in _MAXIMA:
            merged = stacked.amax(0)
        elif how in _MINIMA:
            merged = stacked.amin(0)
        else:
            weights = torch.tensor(rows, dtype=stacked.dtype, device=stacked.device) / sum(rows)
            merged = torch.tensordot(weights, stacked, dims=1)
        return merged.to(_dtype_of(values[0])).cpu(), options


def log_again(module: "pl.LightningModule", logged: Sequence[Logged], *, has_state: bool) -> None:
    """Call ``self.log`` as the last stage did.

    Args:
        module: The model.
        logged: As the last stage recorded it.
        has_state: Whether metrics of this rank were updated.

    """
    modules = dict(module.named_modules())
    for entry in logged:
        value = entry.value
        if entry.metric is not None:
            metric: Any = modules[entry.metric]
            metric._forward_cache = value
            if not has_state:
                metric._update_count = max(1, metric._update_count)
            value = metric
        module.log(entry.name, value, **entry.options)


def _dtype_of(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float32
