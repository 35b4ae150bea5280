"""Lightning's model-parallel strategy on a mesh of replicas and shards."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_commopt.routes import ControlGroup
from lightning_commopt.sharded.parameters import sharded_modules

__all__ = ["REPLICATE", "SHARD", "HybridMesh"]

REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's dimensions, as torch's documentation has them."""


class HybridMesh(ModelParallelStrategy):
    """Sets up a mesh ``("replicate", "shard")`` and a module that need not override `configure_model`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._controls: tuple[object, ControlGroup, ControlGroup] | None = None

    def _shard_size(self) -> int:
        """Ranks over which parameters are sharded; the process group exists."""
        raise NotImplementedError

    def _shard(self) -> None:
        """Shard the module, if it is not."""
        raise NotImplementedError

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is None:  # torchrun starts the processes; ours are guarded by their launcher all the same
            assert self.cluster_environment is not None
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        shape = (self.world_size // (size := self._shard_size()), size)
        mesh = self._device_mesh
        if mesh is None or tuple(mesh.mesh.shape) != shape:  # a second fit has the groups of the first
            self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks of a node, over which parameters are sharded."""
        return self.device_mesh[SHARD]

    @property
    def replica_mesh(self) -> DeviceMesh:
        """The ranks with this rank's shard, one a node."""
        return self.device_mesh[REPLICATE]

    @property
    def replicas(self) -> int:
        """Copies of the model, one a node."""
        return self.replica_mesh.size()

    @property
    def _replicas_control(self) -> ControlGroup:
        """The control group of the ranks with this rank's shard."""
        return self._control_groups()[0]

    @property
    def _shards_control(self) -> ControlGroup:
        """The control group of the ranks of this rank's replica."""
        return self._control_groups()[1]

    def _control_groups(self) -> tuple[ControlGroup, ControlGroup]:
        """Return both, made once for each default process group. A collective."""
        world, mesh = dist.group.WORLD, self.device_mesh.mesh
        if self._controls is None or self._controls[0] is not world:
            replicas, shards = (ControlGroup(self._timeout, parts.tolist()) for parts in (mesh.t(), mesh))
            self._controls = (world, replicas, shards)
        return self._controls[1:]

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard()
        _materialize_distributed_module(self.model, self.root_device)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._reshard()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._reshard()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._reshard()

    def _reshard(self) -> None:
        """Free parameters that FSDP2 keeps gathered for a backward, which does not follow."""
        if self.lightning_module is not None:
            for module in sharded_modules(self.lightning_module):
                module.reshard()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | dict.fromkeys(("_device_mesh", "_controls"))
