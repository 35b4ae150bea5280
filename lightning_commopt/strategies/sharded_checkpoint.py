"""Checkpoints of a sharded model: Lightning's, with residuals and the state of every optimizer."""

from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.failure import FailTogether
from lightning_commopt.sharded import HybridMesh, ShardedPath
from lightning_commopt.sharded.unstepped import filled_in, forget_states, unstepped_names
from lightning_commopt.sharded.whole_file import load_whole, whole_optimizer_state
from lightning_commopt.strategies.residual_checkpoint import KEY, ResidualCheckpoint

__all__ = ["ShardedCheckpoint"]

_UNSTEPPED = "commopt_unstepped"
"""Key of a checkpoint: by optimizer, the parameters that no step has reached."""


class ShardedCheckpoint(FailTogether, HybridMesh):
    """Saves a folder of shards, or one file of whole weights, and resumes from both."""

    _checkpoint: ResidualCheckpoint
    _path: ShardedPath | None

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self.model is not None
        with filled_in(own):
            if self._save_distributed_checkpoint:
                return super().optimizer_state(own)
            return whole_optimizer_state(self.model, own)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: "str | Path", storage_options: Any = None) -> None:
        """Add the residuals to a checkpoint that can be resumed from; plain Lightning ignores them."""
        written = None
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted:
            self._checkpoint.leave_out(checkpoint, self._path)
        elif self._path is not None and "optimizer_states" in checkpoint:
            written = self._checkpoint.add(checkpoint, str(filepath), self._path, self._control, self.checkpoint_io)
            checkpoint[KEY]["shadow"] = self._path.shadow
        if "optimizer_states" in checkpoint:
            checkpoint[_UNSTEPPED] = [unstepped_names(self.lightning_module, own) for own in self.optimizers]
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if written is not None and self.is_global_zero:
            self._checkpoint.sweep(*written)

    @override
    def load_checkpoint(self, checkpoint_path: "str | Path", weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file():
            strict = self.lightning_module.strict_loading
            checkpoint = load_whole(path, self.lightning_module, self.optimizers, strict, weights_only)
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        for optimizer, names in zip(self.optimizers, checkpoint.get(_UNSTEPPED, []), strict=False):
            forget_states(self.lightning_module, optimizer, names)
        self._checkpoint.remember(str(checkpoint_path), checkpoint)
        if self._path is None:
            self._checkpoint.forget()
        else:
            self._checkpoint.restore(self._path, self._control, self.checkpoint_io)
            if checkpoint.get(KEY, {}).get("shadow"):
                self._path.keep_shadow()
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: "str | Path") -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self._checkpoint.remove(str(filepath))
