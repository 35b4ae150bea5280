"""How ranks may divide the work."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Model

__all__ = ["Kind", "Layout", "layouts"]

Kind = Literal["data", "pipeline", "tensor", "hsdp", "zero"]
_MOST_STAGES = 16


@dataclass(frozen=True)
class Layout:
    """A division of the work.

    Args:
        kind: Which strategy does it.
        replicas: Copies of the model (under ``"zero"``: ranks).
        stages: Of a pipeline.
        tensor: Ranks that divide the matrices of a stage.
        shards: Ranks that share parameters, gradients and optimizer states.
        stage: Of ZeRO: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        hpz: Ranks of a node that keep a second copy of the parameters in ZeRO++; 1: none.

    """

    kind: Kind
    replicas: int
    stages: int = 1
    tensor: int = 1
    shards: int = 1
    stage: int = 0
    hpz: int = 1

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that a copy of the model takes where it is cut."""
        return self.stages * self.tensor

    def blocks_of(self, layers: int) -> list[int]:
        """Return the blocks of each stage: the first ones have one more where not all are equal.

        Args:
            layers: Blocks of the model.

        """
        return [layers // self.stages + (stage < layers % self.stages) for stage in range(self.stages)]

    def largest_part(self, layers: int) -> float:
        """Return the part of a copy that a rank of its largest stage has.

        Args:
            layers: Blocks of the model.

        """
        return max(self.blocks_of(layers)) / layers / self.tensor

    def __str__(self) -> str:
        if self.kind == "zero":
            return f"ZeRO stage {self.stage} over {self.replicas}" + (f", hpZ {self.hpz}" if self.hpz > 1 else "")
        if self.kind == "hsdp":
            return f"HSDP, {self.shards} shards x {self.replicas}"
        parts = [f"pipeline {self.stages}"] if self.stages > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"data {self.replicas}"] if self.replicas > 1 or not parts else []
        return " x ".join(parts)


def layouts(model: Model, cluster: Cluster) -> Iterator[Layout]:
    """Yield what the strategies of this package can do on a cluster.

    Ranks of a copy are consecutive. Tensor parallel stays inside a node; stages do, or fill whole nodes.

    Args:
        model: To be trained.
        cluster: On which.

    """
    world, local = cluster.devices, cluster.local
    yield Layout("data", world)
    for tensor in _divisors(local):
        if model.heads % tensor:
            continue
        for stages in _divisors(world // tensor):
            copy = stages * tensor
            whole = local % copy == 0 or copy % local == 0
            if copy > 1 and whole and stages <= min(model.layers, _MOST_STAGES):
                yield Layout("pipeline" if stages > 1 else "tensor", world // copy, stages, tensor)
    if local > 1:
        yield Layout("hsdp", world // local, shards=local)
    if cluster.nodes > 1:
        yield Layout("hsdp", 1, shards=world)
    if world > 1:
        for stage in (1, 2, 3):
            yield Layout("zero", world, shards=world, stage=stage)
    if cluster.nodes > 1 and local > 1 and cluster.kind == "cuda":
        yield Layout("zero", world, shards=world, stage=3, hpz=local)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
