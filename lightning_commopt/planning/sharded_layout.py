"""A step of ZeRO and of FSDP2."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.exchange import codec_cost, gradient_link, gradient_plan
from lightning_commopt.planning.sharded_step import Collective, ShardedBlock, add_sharded
from lightning_commopt.planning.stepping import Step, add_data_parallel
from lightning_commopt.planning.work import Moved, Work, node_or_inside, sent_bytes
from lightning_commopt.tuning.bucket_cost import bucket_costs
from lightning_commopt.tuning.cost_model import ComputeProfile

__all__ = ["sharded", "zero"]


def zero(work: Work, method: Compression) -> tuple[Step, Moved]:
    """Return a step of ZeRO stages 1 and 2 as DeepSpeed 0.19 does them, and what it sends.

    Buckets are all-reduced (in stage 2 in every pass), each rank updates its part, and parameters are gathered.
    """
    step, cluster, training = Step(), work.cluster, work.training
    size, passes = training.activation_size, work.passes if work.layout.stage == 2 else 1
    plan = gradient_plan(work.model, training, cluster, method, 1)
    if isinstance(method, Uncompressed):
        plan = replace(plan, bytes_per_element=float(size))
    joined = gradient_link(cluster, work.layout, method)
    costs = bucket_costs(joined, plan)
    link, profile, last = node_or_inside(cluster.nodes > 1), work.profile, [0]
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
            node_share=joined.node_share,
        )
    step.add(
        after=last,
        links=[(link, ring.wire_ms(gathered, 0))],
        latency_ms=(cluster.devices - 1) * ring.latency_ms,
        node_bytes=cluster.ring_share(cluster.devices, cluster.local) * gathered,
    )
    return step, Moved(0.0, passes * sent_bytes(costs), 0.0, gathered, 0.0)


def sharded(work: Work, method: Compression | None) -> tuple[Step, Moved]:
    """Return a step of FSDP2 or ZeRO stage 3, and what it sends; no method: ZeRO++."""
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
    part = (shards - 1) / shards * numel
    gather = _ring_collective(cluster, shards, in_node, part * work.training.activation_size)
    reduce = _ring_collective(cluster, shards, in_node, part * 4)
    exchange, share = None, 0.0
    if layout.replicas > 1:
        plan = gradient_plan(work.model, work.training, cluster, method, shards)
        plan = replace(plan, bucket_numels=[ceil(numel / shards)])
        joined = gradient_link(cluster, layout, method)
        (exchange,), share = bucket_costs(joined, plan), joined.node_share
    block = ShardedBlock(
        profile.forward_ms / layers,
        profile.backward_ms / layers,
        gather,
        gather,
        reduce,
        exchange,
        node_or_inside(True),
        share,
    )
    sent = part * 4 * work.passes + (0.0 if exchange is None else exchange.sent_bytes)
    return block, sent, 2 * part * work.training.activation_size


def _zero3(
    work: Work, method: Compression | None, numel: int, profile: ComputeProfile
) -> tuple[ShardedBlock, float, float]:
    cluster, layers, world = work.cluster, work.model.layers, work.cluster.devices
    size, part = work.training.activation_size, (world - 1) / world * numel
    if method is None:
        gather, again, reduce, sent = _zero_plus_plus(work, numel)
    else:
        gather = again = _ring_collective(cluster, world, cluster.local, part * size)
        sent = part * size
        if isinstance(method, Uncompressed):
            reduce = _ring_collective(cluster, world, cluster.local, sent)
        else:
            sent = (world - 1) / world * method.wire_bytes(ceil(numel / method.alignment) * method.alignment)
            channel, codec = cluster.all_to_all(world, cluster.local), codec_cost(method, cluster)
            work_ms = (codec.encode_ns + codec.decode_ns + codec.handling_ns) * numel * 1e-6 + codec.bucket_us * 1e-3
            share = cluster.all_to_all_share(world, cluster.local)
            reduce = Collective(
                node_or_inside(cluster.nodes > 1), channel.wire_ms(sent, 0), channel.latency_ms, work_ms, share * sent
            )
    block = ShardedBlock(profile.forward_ms / layers, profile.backward_ms / layers, gather, again, reduce)
    if method is not None:
        return block, sent * work.passes, 2 * part * size
    inside = (cluster.local - 1) / cluster.local * numel * size
    return block, sent * work.passes, part + (inside if work.layout.hpz > 1 else part)


def _ring_collective(cluster: Cluster, ranks: int, in_node: int, nbytes: float) -> Collective:
    """Each of the ranks sends so many bytes round a ring."""
    ring, share = cluster.ring(ranks, in_node), cluster.ring_share(ranks, in_node)
    return Collective(
        node_or_inside(ranks > in_node),
        ring.wire_ms(nbytes, 0),
        (ranks - 1) * ring.latency_ms,
        node_bytes=share * nbytes,
    )


def _zero_plus_plus(work: Work, numel: int) -> tuple[Collective, Collective, Collective, float]:
    """Wang et al. (arXiv 2306.10209): int8 parameters, a second copy a node, int4 gradients in two hops."""
    cluster, world, local = work.cluster, work.cluster.devices, work.cluster.local
    part = (world - 1) / world * numel
    rate = cluster.memory_rate * 1e-3
    gather = replace(
        _ring_collective(cluster, world, local, part), work_ms=numel * 3 / rate
    )  # bytes are read, halves are written
    again = gather
    if work.layout.hpz > 1:
        inside = (local - 1) / local * numel * work.training.activation_size
        again = _ring_collective(cluster, local, local, inside)
    inside_sent = (local - 1) / local * numel / 2
    between = (cluster.nodes - 1) / cluster.nodes * numel / local / 2
    channel = cluster.all_to_all(cluster.nodes, 1, local)
    inside_ms = inside_sent / cluster.intra_rate * 1e3 + cluster.intra_latency_ms
    work_ms = numel * 4 / rate  # bytes an element, in two hops
    reduce = Collective(
        node_or_inside(cluster.nodes > 1),
        channel.wire_ms(between, 0),
        channel.latency_ms + inside_ms,
        work_ms,
        cluster.all_to_all_share(cluster.nodes, 1, local) * between,
    )
    return gather, again, reduce, inside_sent + between
