"""torchmetrics whose states only the last stage has."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torchmetrics import Metric

from lightning_commopt.routes import ControlGroup

__all__ = ["StagedMetrics"]


class StagedMetrics:
    """Computes metrics where their states are, and tells the other ranks of the pipeline. Until :meth:`close`.

    Args:
        module: With metrics; all ranks compute them in the same order.
        source: The place of the last stage in the pipeline.
        control: The ranks of the pipeline.
        data: The ranks with the same stages, over which states are synchronised.
        in_step: Whether a step of the user is running, in which a metric is computed there alone.

    """

    def __init__(
        self,
        module: nn.Module,
        source: int,
        control: ControlGroup,
        data: dist.ProcessGroup,
        in_step: Callable[[], bool],
    ) -> None:
        self._undo: list[tuple[Metric, Any, Any]] = []
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._undo.append((metric, metric.compute, metric.process_group))
                metric.process_group = data
                metric.compute = _computed(metric, metric.compute, source, control, in_step)  # type: ignore[method-assign]

    def close(self) -> None:
        """Give metrics their own ``compute`` back."""
        for metric, compute, group in self._undo:
            metric.compute, metric.process_group = compute, group  # type: ignore[method-assign]
        self._undo = []


def _computed(
    metric: Metric, compute: Callable[..., Any], source: int, control: ControlGroup, in_step: Callable[[], bool]
) -> Callable[..., Any]:
    def computed(*args: Any, **kwargs: Any) -> Any:
        if in_step():
            return compute(*args, **kwargs)
        value = move_data_to_device(compute(*args, **kwargs), "cpu") if control.rank == source else None
        return move_data_to_device(control.broadcast(value, source), metric.device)

    return computed
