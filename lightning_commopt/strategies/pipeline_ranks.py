"""Which ranks hold which copy and stage of a model, and what Lightning reduces over which of them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression import Uncompressed
from lightning_commopt.pipeline.groups import PipelineGroups
from lightning_commopt.routes import GradientPath, Topology
from lightning_commopt.strategies.commopt import CommOptStrategy
from lightning_commopt.strategies.groups import Groups

__all__ = ["PipelineRanks"]


class PipelineRanks(CommOptStrategy):
    """Ranks in a grid: copies of the model, stages of a copy, parts of a stage.

    Lightning's samplers, reductions and gathers go over copies, its decisions over all ranks.
    """

    stages: int | None
    tensor_parallel: int
    _grid: tuple[object, PipelineGroups] | None = None

    @property
    def ranks_per_pipeline(self) -> int:
        """Processes of a pipeline; with ``tensor_parallel``, several pipelines make a copy of the model."""
        return self.world_size // self.tensor_parallel if self.stages is None else self.stages

    @property
    def ranks_per_copy(self) -> int:
        """Processes over which one copy of the model is spread."""
        return max(1, self.ranks_per_pipeline) * self.tensor_parallel

    @property
    def _groups_of_pipeline(self) -> PipelineGroups:
        """The process groups, made once for each default process group."""
        world = dist.group.WORLD
        if self._grid is None or self._grid[0] is not world:
            backend = "nccl" if self.root_device.type == "cuda" else "gloo"
            self._grid = (world, PipelineGroups(self.ranks_per_pipeline, backend, self._timeout, self.tensor_parallel))
        return self._grid[1]

    @override
    def setup_environment(self) -> None:
        world = self.world_size
        if world % self.ranks_per_copy:
            times = f" times `tensor_parallel={self.tensor_parallel}`" if self.tensor_parallel > 1 else ""
            raise ValueError(
                f"`stages={self.stages}`{times} must divide the number of processes, which is {world}: change "
                "`devices` or `stages`."
            )
        super().setup_environment()
        _ = self._groups_of_pipeline

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        ranks = self.ranks_per_copy
        return {"num_replicas": self.world_size // ranks, "rank": self.global_rank // ranks}

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, group or self._groups_of_pipeline.data, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_leaving:
            return decision
        votes = self._control.all_gather(decision)
        return False not in votes if all else True in votes

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group or self._groups_of_pipeline.data, sync_grads)

    @override
    def _process_groups(self) -> Groups:
        grid = self._groups_of_pipeline
        return Groups(grid.gradients, None, Topology(1, grid.replicas, "stages are replicated"))

    @property
    @override
    def _exchanges(self) -> bool:
        return not isinstance(self.compression, Uncompressed) and self.world_size > self.ranks_per_copy

    @property
    @override
    def _carries_sigterm(self) -> GradientPath | None:
        return None  # it would reach the ranks with the same stage alone
