"""Checkpoints of a model in stages: those of a single process, written from and loaded into parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.failure.phase import Phase
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.materialise import is_on_meta
from lightning_commopt.pipeline.residuals import MergedPath, StagePath
from lightning_commopt.pipeline.staged import StagedModel
from lightning_commopt.pipeline.state import OptimizerNames, ScatteredState
from lightning_commopt.strategies.pipeline_ranks import PipelineRanks

__all__ = ["PipelineCheckpoint"]


class PipelineCheckpoint(PipelineRanks):
    """Saves what a single process would save, and loads it before the model is cut."""

    _staged: StagedModel | None = None
    _staged_optimizer: OptimizerNames | None = None
    _resumed_from: Mapping[str, Any] | None = None
    _module_state: Mapping[str, Tensor] | None = None  # for a module on the meta device
    _scattered: ScatteredState | None = None  # after a run of such a module

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.watch is not None:
            self.watch.enter(Phase.CHECKPOINT)
        assert self.lightning_module is not None
        source: StagedModel | ScatteredState | None = self._staged or (self._scattered if self._is_scattered else None)
        if source is None:
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state
        return {} if self._groups_of_pipeline.replica or self._is_leaving else source.state_dict()

    @property
    def _is_scattered(self) -> bool:
        """Whether the weights of the module are on several ranks since an earlier run."""
        return self._scattered is not None and self._scattered.module is self.lightning_module

    @override
    def load_checkpoint(self, checkpoint_path: "str | Path", weights_only: bool | None = None) -> dict[str, Any]:
        module, path = self.lightning_module, str(checkpoint_path)
        if module is None or not is_on_meta(module) or not is_zipfile(path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        # each rank takes its own part, and leaves the rest on the disk
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        self._checkpoint.remember(path, checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if not is_on_meta(module):
            super().load_model_state_dict(checkpoint, strict)
            return
        self._module_state = checkpoint["state_dict"]
        if strict and (other := module.state_dict().keys() ^ self._module_state.keys()):
            raise PipelineError(f"`{min(other)}` is in the model or in the checkpoint, and not in the other one.")

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        grid = self._groups_of_pipeline
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._staged_optimizer is None or not self._staged_optimizer.is_staged:
            return super().optimizer_state(optimizer)
        if grid.replica or self._is_leaving:
            return {}
        return self._staged_optimizer.state_dict(grid)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: "str | Path", storage_options: Any = None) -> None:
        if self._is_leaving:
            if self.is_global_zero:
                rank_zero_warn("No checkpoint was written: after a failure the stages of other ranks are out of reach.")
            return
        if self.watch is not None:
            self.watch.enter(Phase.CHECKPOINT)
        written = None
        grid = self._groups_of_pipeline
        if self._path is not None and "optimizer_states" in checkpoint:
            merged: Any = MergedPath(self._path, grid)
            if grid.copy_control.rank == 0:
                written = self._checkpoint.add(checkpoint, str(filepath), merged, grid.data_control, self.checkpoint_io)
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        if written is not None and self.is_global_zero:
            self._checkpoint.sweep(*written)
        if self.watch is not None:
            self.watch.enter(Phase.BETWEEN_BATCHES)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})  # the rest when it is cut
        self._resumed_from = checkpoint

    def _restore_residuals(self) -> None:
        self._resumed_from = None
        if self._path is not None:
            path: Any = StagePath(self._path, self._groups_of_pipeline)
            self._checkpoint.restore(path, self._groups_of_pipeline.data_control, self.checkpoint_io)
        else:
            self._checkpoint.forget()
