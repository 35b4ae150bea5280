"""What is to be done in a step, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import Layout
from lightning_commopt.tuning.bucket_cost import BucketCost
from lightning_commopt.tuning.cost_model import ComputeProfile

__all__ = ["INSIDE", "NODE", "Moved", "Work", "node_or_inside", "sent_bytes"]

INSIDE = "inside"
"""The links of a device to others of its node."""
NODE = "node"
"""What the names of the links begin with that a node has to others."""


@dataclass(frozen=True)
class Work:
    """What is to be done under a layout.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        layout: How ranks divide it.
        samples: Of a pass of one copy of the model: a batch, or a microbatch.
        passes: Of a step.

    """

    model: Model
    training: Training
    cluster: Cluster
    layout: Layout
    samples: float
    passes: int

    @property
    def factors(self) -> tuple[float, ...]:
        """How many times as long each kind of rank computes."""
        slow, world = self.cluster.straggler, self.cluster.devices
        return (1.0,) if slow == 1 or world == 1 else (1.0, slow)

    @property
    def profile(self) -> ComputeProfile:
        """Forward and backward of one pass, and the optimizer, of one rank, tensor parallel's messages left out."""
        model, training, cluster, layout = self.model, self.training, self.cluster, self.layout
        if training.compute_ms is None:
            whole_ms = model.flops(self.samples) / (cluster.flops_per_second * cluster.utilisation) * 1e3
        else:
            whole_ms = training.compute_ms * self.samples / training.compute_samples
        forward_ms = whole_ms / 3 / layout.ranks_per_copy
        again_ms = forward_ms if training.checkpointing and training.compute_ms is None else 0.0
        return ComputeProfile(forward_ms, 2 * forward_ms + again_ms, self.optimizer_ms, contention=cluster.contention)

    @property
    def optimizer_ms(self) -> float:
        """It reads weight, gradient and moments, and writes all but the gradient; as fast as the memory."""
        own = self.model.params / self.layout.ranks_per_copy / self.layout.shards
        touched = (3 + 2 * self.training.moments) * 4 * own
        return touched / self.cluster.memory_rate * 1e3


@dataclass(frozen=True)
class Moved:
    """What a step takes and moves.

    Args:
        step_ms: Its duration.
        gradient_bytes: That a rank sends, the one that sends most.
        activation_bytes: That a rank sends to other stages and to those that divide its matrices.
        parameter_bytes: That a rank sends.
        node_bytes: That a node sends to others.

    """

    step_ms: float
    gradient_bytes: float
    activation_bytes: float
    parameter_bytes: float
    node_bytes: float


def node_or_inside(crosses: bool, node: int = 0) -> str:
    """Return the name of the link that messages take."""
    return f"{NODE} {node}" if crosses else INSIDE


def sent_bytes(costs: Sequence[BucketCost]) -> float:
    """Return what a rank sends for some buckets."""
    return sum(cost.sent_bytes for cost in costs)
