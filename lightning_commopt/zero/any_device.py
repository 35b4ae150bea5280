"""Lightning's DeepSpeed strategy, on the CPU too."""

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

__all__ = ["AnyDeviceDeepSpeed"]


class AnyDeviceDeepSpeed(DeepSpeedStrategy):
    """On CUDA the stock strategy. On the CPU without the three places that take a CUDA device for granted."""

    @property
    def _on_cpu(self) -> bool:
        return super().root_device.type == "cpu"

    @property
    @override
    def root_device(self) -> torch.device:
        """The device, with an index: DeepSpeed compares it with a number."""
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    @override
    def setup_environment(self) -> None:
        if not self._on_cpu:
            super().setup_environment()
            return
        _use_cpu()
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _auto_select_batch_size(self) -> int:
        """As in Lightning, for loaders that do not batch too."""
        assert self.lightning_module is not None
        return self._loader_batch_size(self.lightning_module.trainer) or 1

    def _loader_batch_size(self, trainer: "pl.Trainer") -> int | None:
        """The batch size of the training data loader; None where it says none, or is not there yet."""
        source = trainer.fit_loop._data_source
        if source.instance is None or not source.is_defined():
            return None
        sampler = getattr(source.dataloader(), "batch_sampler", None)
        size = getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None


def _use_cpu() -> None:
    """Make DeepSpeed run on the CPU, without compiling its shared-memory collectives (40 s, and a compiler)."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() != "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
