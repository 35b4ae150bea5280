"""A step under a layout and a method: what it takes, and what it moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.pipeline.schedules import one_f_one_b
from lightning_commopt.pipeline.simulate import StageCost
from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.events import run
from lightning_commopt.planning.exchange import codec_cost, gradient_link, gradient_plan
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import Layout
from lightning_commopt.planning.pipelined import Travel, add_pipelined
from lightning_commopt.planning.sharded_step import Collective, ShardedBlock, add_sharded
from lightning_commopt.planning.stepping import Step, add_data_parallel
from lightning_commopt.tuning.bucket_cost import BucketCost, bucket_costs
from lightning_commopt.tuning.cost_model import ComputeProfile
from lightning_commopt.tuning.links import Channel

__all__ = ["Measured", "Moved", "Work", "simulate_layout"]

_INSIDE = "inside"
_NODE = "node"


@dataclass(frozen=True)
class Measured:
    """What takes the place of assumptions where it was measured.

    Args:
        profile: A pass of ``samples`` samples without exchange, and the optimizer.
        samples: See there.
        channel: What a rank's messages take; None: from the cluster.

    """

    profile: ComputeProfile
    samples: float
    channel: Channel | None = None


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
        return ComputeProfile(forward_ms, 2 * forward_ms + again_ms, self.optimizer_ms)

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
        gradient_bytes: That a rank sends.
        activation_bytes: That a rank sends to other stages and to those that divide its matrices.
        parameter_bytes: That a rank sends.
        node_bytes: That a node sends to others.

    """

    step_ms: float
    gradient_bytes: float
    activation_bytes: float
    parameter_bytes: float
    node_bytes: float


def simulate_layout(work: Work, method: Compression | None) -> Moved:
    """Simulate a step.

    Args:
        work: What is to be done.
        method: Of compression; None: DeepSpeed's own ZeRO++.

    """
    if work.layout.kind == "data":
        step, moved = _data_parallel(work, method or Uncompressed())
    elif work.layout.kind in ("pipeline", "tensor"):
        step, moved = _pipelined(work, method or Uncompressed())
    elif work.layout.kind == "zero" and work.layout.stage < 3:
        step, moved = _zero(work, method or Uncompressed())
    else:
        step, moved = _sharded(work, method)
    busy_ms = sum(ms for task in step.tasks for name, ms in task.links if name.startswith(_NODE))
    nodes = len({name for task in step.tasks for name, _ in task.links if name.startswith(_NODE)})
    node_bytes = busy_ms / max(1, nodes) * 1e-3 * work.cluster.inter_rate
    return replace(moved, step_ms=run(step.tasks).end, node_bytes=node_bytes)


def _node_or_inside(crosses: bool, node: int = 0) -> str:
    return f"{_NODE} {node}" if crosses else _INSIDE


def _data_parallel(work: Work, method: Compression) -> tuple[Step, Moved]:
    step, cluster = Step(), work.cluster
    plan = gradient_plan(work.model, work.training, cluster, method, 1)
    costs = bucket_costs(gradient_link(cluster, work.layout, method), plan) if work.layout.replicas > 1 else []
    if not costs:
        plan = replace(plan, bucket_numels=())
    link = _node_or_inside(cluster.nodes > 1)
    add_data_parallel(step, work.profile, costs, plan, passes=work.passes, factors=work.factors, link=link)
    return step, Moved(0.0, _sent(costs), 0.0, 0.0, 0.0)


def _sent(costs: Sequence[BucketCost]) -> float:
    return sum(cost.sent_bytes for cost in costs)


# ---- pipeline and tensor parallel -----------------------------------------------------------------------------------


def _pipelined(work: Work, method: Compression) -> tuple[Step, Moved]:
    model, cluster, layout, local = work.model, work.cluster, work.layout, work.cluster.local
    step, schedule = Step(), one_f_one_b(layout.stages, work.passes)
    message = work.samples * model.sequence * model.hidden * work.training.activation_size
    tensor_bytes, tensor_ms = _tensor_parallel(work, message)
    profile = work.profile
    cost = StageCost(profile.forward_ms + tensor_ms / 2, profile.backward_ms + tensor_ms / 2)
    plan = gradient_plan(model, work.training, cluster, method, layout.ranks_per_copy)
    costs = bucket_costs(gradient_link(cluster, layout, method), plan) if layout.replicas > 1 else []
    crosses = layout.replicas > max(1, local // layout.ranks_per_copy)
    links = [_node_or_inside(crosses, stage * layout.tensor // local) for stage in range(layout.stages)]
    slow = [work.cluster.straggler if stage == layout.stages // 2 else 1.0 for stage in range(layout.stages)]
    kinds = [[1.0] * layout.stages] if layout.replicas > 1 or len(work.factors) == 1 else []
    kinds += [slow] if len(work.factors) > 1 else []
    travels = [_travel(work, message, copy) for copy in range(len(kinds))]
    add_pipelined(
        step, schedule, [cost] * layout.stages, travels, [costs] * layout.stages, links, profile.optimizer_ms, kinds
    )
    hops = 2 * (layout.stages - 1) / layout.stages * work.passes
    return step, Moved(0.0, _sent(costs), hops * message + tensor_bytes, 0.0, 0.0)


def _travel(work: Work, message: float, copy: int) -> Travel:
    """Return what a message between stages takes: every rank of a stage sends it whole to its counterpart."""
    cluster, tensor, local = work.cluster, work.layout.tensor, work.cluster.local

    def travel(source: int, target: int) -> tuple[tuple[tuple[str, float], ...], float]:
        from_node, to_node = source * tensor // local, target * tensor // local
        if from_node == to_node:
            return (), message / cluster.intra_rate * 1e3 + cluster.intra_latency_ms
        busy_ms = tensor * message / cluster.inter_rate * 1e3
        return ((f"{_NODE} {from_node} of copy {copy}" if copy else f"{_NODE} {from_node}", busy_ms),), (
            cluster.inter_latency_ms
        )

    return travel


def _tensor_parallel(work: Work, message: float) -> tuple[float, float]:
    """Return the bytes of a step and the ms of a pass for all-reduces of activations: two a block each way."""
    tensor = work.layout.tensor
    if tensor == 1:
        return 0.0, 0.0
    layers = ceil(work.model.layers / work.layout.stages)
    count = layers * (6 if work.training.checkpointing else 4)
    sent = 2 * (tensor - 1) / tensor * message
    one_ms = sent / work.cluster.intra_rate * 1e3 + 2 * (tensor - 1) * work.cluster.intra_latency_ms
    return count * sent * work.passes, count * one_ms


# ---- sharded --------------------------------------------------------------------------------------------------------


def _zero(work: Work, method: Compression) -> tuple[Step, Moved]:
    """ZeRO stages 1 and 2 as DeepSpeed 0.19 does them.

    Buckets are all-reduced (in stage 2 in every pass), each rank updates its part, and parameters are gathered.
    """
    step, cluster, training = Step(), work.cluster, work.training
    size, passes = training.activation_size, work.passes if work.layout.stage == 2 else 1
    plan = gradient_plan(work.model, training, cluster, method, 1)
    if isinstance(method, Uncompressed):
        plan = replace(plan, bytes_per_element=float(size))
    costs = bucket_costs(gradient_link(cluster, work.layout, method), plan)
    link, profile, last = _node_or_inside(cluster.nodes > 1), work.profile, [0]
    ring = cluster.ring(cluster.devices, cluster.local)
    gathered = (cluster.devices - 1) / cluster.devices * work.model.params * size
    without = replace(profile, optimizer_ms=0.0)
    for place in range(passes):
        final = place == passes - 1
        last = add_data_parallel(
            step,
            profile if final else without,
            costs,
            plan,
            passes=1 if passes > 1 else work.passes,
            factors=work.factors,
            link=link,
        )
    _add_gather(step, last, link, ring, gathered, cluster.devices - 1)
    return step, Moved(0.0, passes * _sent(costs), 0.0, gathered, 0.0)


def _add_gather(step: Step, after: Sequence[int], link: str, ring: Channel, nbytes: float, hops: int) -> None:
    step.add(after=after, links=[(link, ring.wire_ms(nbytes, 0))], latency_ms=hops * ring.latency_ms)


def _sharded(work: Work, method: Compression | None) -> tuple[Step, Moved]:
    """FSDP2, and ZeRO stage 3."""
    step, layers = Step(), work.model.layers
    profile, numel = work.profile, work.model.layer_params
    make: Callable[..., tuple[ShardedBlock, float, float]] = _hsdp if work.layout.kind == "hsdp" else _zero3
    block, gradient_bytes, parameter_bytes = make(work, method, numel, profile)
    add_sharded(step, block, layers, work.passes, profile.optimizer_ms, work.factors)
    return step, Moved(0.0, layers * gradient_bytes, 0.0, layers * parameter_bytes * work.passes, 0.0)


def _hsdp(
    work: Work, method: Compression | None, numel: int, profile: ComputeProfile
) -> tuple[ShardedBlock, float, float]:
    cluster, layout, layers = work.cluster, work.layout, work.model.layers
    assert method is not None
    shards, in_node = layout.shards, min(layout.shards, cluster.local)
    ring = cluster.ring(shards, in_node)
    link = _node_or_inside(shards > in_node)
    part = (shards - 1) / shards * numel
    gather = _ring_collective(link, ring, part * work.training.activation_size, shards - 1)
    reduce = _ring_collective(link, ring, part * 4, shards - 1)
    exchange = None
    if layout.replicas > 1:
        plan = gradient_plan(work.model, work.training, cluster, method, shards)
        plan = replace(plan, bucket_numels=[ceil(numel / shards)])
        (exchange,) = bucket_costs(gradient_link(cluster, layout, method), plan)
    block = ShardedBlock(
        profile.forward_ms / layers,
        profile.backward_ms / layers,
        gather,
        gather,
        reduce,
        exchange,
        _node_or_inside(True),
    )
    sent = part * 4 * work.passes + (0.0 if exchange is None else exchange.sent_bytes)
    return block, sent, 2 * part * work.training.activation_size


def _zero3(
    work: Work, method: Compression | None, numel: int, profile: ComputeProfile
) -> tuple[ShardedBlock, float, float]:
    cluster, layers, world = work.cluster, work.model.layers, work.cluster.devices
    size, part = work.training.activation_size, (world - 1) / world * numel
    ring, link = cluster.ring(world, cluster.local), _node_or_inside(cluster.nodes > 1)
    if method is None:
        gather, again, reduce, sent = _zero_plus_plus(work, numel, ring, link)
    else:
        gather = again = _ring_collective(link, ring, part * size, world - 1)
        sent = part * size
        if isinstance(method, Uncompressed):
            reduce = _ring_collective(link, ring, sent, world - 1)
        else:
            sent = (world - 1) / world * method.wire_bytes(ceil(numel / method.alignment) * method.alignment)
            channel, codec = cluster.all_to_all(world, cluster.local), codec_cost(method, cluster)
            work_ms = (codec.encode_ns + codec.decode_ns + codec.handling_ns) * numel * 1e-6 + codec.bucket_us * 1e-3
            reduce = Collective(link, channel.wire_ms(sent, 0), channel.latency_ms, work_ms)
    block = ShardedBlock(profile.forward_ms / layers, profile.backward_ms / layers, gather, again, reduce)
    if method is not None:
        return block, sent * work.passes, 2 * part * size
    inside = (cluster.local - 1) / cluster.local * numel * size
    return block, sent * work.passes, part + (inside if work.layout.hpz > 1 else part)


def _ring_collective(link: str, ring: Channel, nbytes: float, hops: int) -> Collective:
    return Collective(link, ring.wire_ms(nbytes, 0), hops * ring.latency_ms)


def _zero_plus_plus(
    work: Work, numel: int, ring: Channel, link: str
) -> tuple[Collective, Collective, Collective, float]:
    """Wang et al. (arXiv 2306.10209): int8 parameters, a second copy a node, int4 gradients in two hops."""
    cluster, world, local = work.cluster, work.cluster.devices, work.cluster.local
    part = (world - 1) / world * numel
    rate = cluster.memory_rate * 1e-3
    gather = replace(
        _ring_collective(link, ring, part, world - 1), work_ms=numel * 3 / rate
    )  # bytes are read, halves are written
    again = gather
    if work.layout.hpz > 1:
        inside = (local - 1) / local * numel * work.training.activation_size
        again = _ring_collective(_INSIDE, cluster.ring(local, local), inside, local - 1)
    inside_sent = (local - 1) / local * numel / 2
    between = (cluster.nodes - 1) / cluster.nodes * numel / local / 2
    channel = cluster.all_to_all(cluster.nodes, 1, local)
    inside_ms = inside_sent / cluster.intra_rate * 1e3 + cluster.intra_latency_ms
    work_ms = numel * 4 / rate  # bytes an element, in two hops
    reduce = Collective(link, channel.wire_ms(between, 0), channel.latency_ms + inside_ms, work_ms)
    return gather, again, reduce, inside_sent + between
