"""Clipping and loss scaling over all stages of a pipeline."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

__all__ = ["StagedPrecision"]


class StagedPrecision:
    """Changes a precision plugin for a run, until :meth:`close`.

    Norms are those of the whole model, and an overflow on one stage skips the step on all.

    Args:
        plugin: The Trainer's.
        group: The ranks of the pipeline.
        device: Where gradients are.
        counts_here: Whether this rank counts a parameter; one that several stages share is counted by one.

    """

    def __init__(
        self, plugin: Precision, group: dist.ProcessGroup, device: torch.device, counts_here: Callable[[Tensor], bool]
    ) -> None:
        self._plugin: Any = plugin
        self._group, self._device, self._counts_here = group, device, counts_here
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self._scaler = scaler = getattr(plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            self._plugin.scaler = self._staged(scaler)

    @property
    def scale(self) -> Tensor | float:
        """The factor that the gradient scaler puts on losses."""
        scaler = getattr(self._plugin, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return 1.0
        scale: Tensor = scaler.scale(torch.ones((), device=self._device))
        return scale

    def close(self) -> None:
        """Give the plugin its own methods back."""
        vars(self._plugin).pop("clip_grad_by_norm", None)
        staged: Any = getattr(self._plugin, "scaler", None)
        if self._scaler is not None and staged is not self._scaler:
            self._scaler.load_state_dict(staged.state_dict())
            self._plugin.scaler = self._scaler

    def _staged(self, scaler: torch.amp.GradScaler) -> ShardedGradScaler:
        staged = ShardedGradScaler(
            self._device.type,
            init_scale=scaler.get_scale(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_factor=scaler.get_growth_factor(),
            growth_interval=scaler.get_growth_interval(),
            process_group=self._group,
        )
        staged._init_growth_tracker = scaler._get_growth_tracker()
        return staged

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages."""
        parameters = [p for p in self._plugin.main_params(optimizer) if p.grad is not None]
        own = [p.grad for p in parameters if self._counts_here(p)]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for norm in torch._foreach_norm(own) if own else ():
            square += norm.double().square()
        dist.all_reduce(square, group=self._group)
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), square.sqrt().float())
