"""A step under a layout and a method: what it takes, and what it moves."""

from dataclasses import astuple, replace

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.pipeline.schedules import one_f_one_b
from lightning_commopt.pipeline.simulate import StageCost
from lightning_commopt.planning.events import run
from lightning_commopt.planning.exchange import GradientLink, gradient_link, gradient_plan
from lightning_commopt.planning.pipelined import Travel, add_pipelined
from lightning_commopt.planning.sharded_layout import sharded, zero
from lightning_commopt.planning.stepping import Step, add_data_parallel
from lightning_commopt.planning.work import NODE, Moved, Work, node_or_inside, sent_bytes
from lightning_commopt.tuning.bucket_cost import BucketCost, bucket_costs

__all__ = ["Moved", "Work", "simulate_layout"]


_MOST_PASSES = 16  # for each stage; from there on, every pass takes what the last ones took


def simulate_layout(work: Work, method: Compression | None) -> Moved:
    """Simulate a step; where it has very many passes, some of them, and continue in a straight line.

    Args:
        work: What is to be done.
        method: Of compression; None: DeepSpeed's own ZeRO++.

    """
    most = _MOST_PASSES * work.layout.stages
    if work.passes <= most or work.layout.kind == "data":
        return _simulated(work, method)
    half, whole = (astuple(_simulated(replace(work, passes=passes), method)) for passes in (most // 2, most))
    times = (work.passes - most) / (most - most // 2)
    return Moved(*(after + times * (after - before) for before, after in zip(half, whole, strict=True)))


def _simulated(work: Work, method: Compression | None) -> Moved:
    if work.layout.kind == "data":
        step, moved = _data_parallel(work, method or Uncompressed())
    elif work.layout.kind in ("pipeline", "tensor"):
        step, moved = _pipelined(work, method or Uncompressed())
    elif work.layout.kind == "zero" and work.layout.stage < 3:
        step, moved = zero(work, method or Uncompressed())
    else:
        step, moved = sharded(work, method)
    nodes = max(1, work.layout.ranks_per_copy // work.cluster.local)  # tasks are those of one copy
    node_bytes = sum(task.node_bytes for task in step.tasks) / nodes
    return replace(moved, step_ms=run(step.tasks).end, node_bytes=node_bytes)


def _data_parallel(work: Work, method: Compression) -> tuple[Step, Moved]:
    step, cluster = Step(), work.cluster
    plan = gradient_plan(work.model, work.training, cluster, method, 1)
    joined = gradient_link(cluster, work.layout, method)
    costs = bucket_costs(joined, plan) if work.layout.replicas > 1 else []
    if not costs:
        plan = replace(plan, bucket_numels=())
    link = node_or_inside(cluster.nodes > 1)
    add_data_parallel(
        step,
        work.profile,
        costs,
        plan,
        passes=work.passes,
        factors=work.factors,
        link=link,
        node_share=joined.node_share,
    )
    return step, Moved(0.0, sent_bytes(costs), 0.0, 0.0, 0.0)


def _pipelined(work: Work, method: Compression) -> tuple[Step, Moved]:
    model, cluster, layout, local = work.model, work.cluster, work.layout, work.cluster.local
    step, schedule = Step(), one_f_one_b(layout.stages, work.passes)
    message = work.samples * model.sequence * model.hidden * work.training.activation_size
    profile, each = work.profile, model.layers / layout.stages
    blocks = layout.blocks_of(model.layers)
    tensor_bytes, block_ms = _tensor_parallel(work, message)
    stage_costs = [
        StageCost(*(ms * count / each + block_ms * count / 2 for ms in (profile.forward_ms, profile.backward_ms)))
        for count in blocks
    ]
    joined = gradient_link(cluster, layout, method)
    costs = [_stage_exchange(work, method, joined, count) if layout.replicas > 1 else [] for count in blocks]
    optimizer_ms = [profile.optimizer_ms * count / each for count in blocks]
    crosses = layout.replicas > max(1, local // layout.ranks_per_copy)
    links = [node_or_inside(crosses, stage * layout.tensor // local) for stage in range(layout.stages)]
    slow = [work.cluster.straggler if stage == layout.stages // 2 else 1.0 for stage in range(layout.stages)]
    kinds = [[1.0] * layout.stages] if layout.replicas > 1 or len(work.factors) == 1 else []
    kinds += [slow] if len(work.factors) > 1 else []
    travels = [_travel(work, message, copy) for copy in range(len(kinds))]
    add_pipelined(step, schedule, stage_costs, travels, costs, links, joined.node_share, optimizer_ms, kinds)
    hops = 2 * (layout.stages - 1) / layout.stages * work.passes
    return step, Moved(0.0, max(map(sent_bytes, costs)), hops * message + tensor_bytes, 0.0, 0.0)


def _stage_exchange(work: Work, method: Compression, joined: GradientLink, blocks: int) -> list[BucketCost]:
    """Return what a stage of so many blocks exchanges with its replicas."""
    model = work.model
    stage = replace(model, params=max(1, model.params * blocks // model.layers), layers=blocks)
    return bucket_costs(joined, gradient_plan(stage, work.training, work.cluster, method, work.layout.tensor))


def _travel(work: Work, message: float, copy: int) -> Travel:
    """Return what a message between stages takes: every rank of a stage sends it whole to its counterpart.

    Bytes of nodes are counted for one copy; all copies send as much.
    """
    cluster, tensor, local = work.cluster, work.layout.tensor, work.cluster.local

    def travel(source: int, target: int) -> tuple[tuple[tuple[str, float], ...], float, float]:
        from_node, to_node = source * tensor // local, target * tensor // local
        if from_node == to_node:
            return (), message / cluster.intra_rate * 1e3 + cluster.intra_latency_ms, 0.0
        nbytes = tensor * message
        link = f"{NODE} {from_node} of copy {copy}" if copy else f"{NODE} {from_node}"
        return ((link, nbytes / cluster.inter_rate * 1e3),), cluster.inter_latency_ms, 0.0 if copy else nbytes

    return travel


def _tensor_parallel(work: Work, message: float) -> tuple[float, float]:
    """Return the bytes of a step and the ms of a pass and block for all-reduces of activations: two each way."""
    tensor = work.layout.tensor
    if tensor == 1:
        return 0.0, 0.0
    layers, count = max(work.layout.blocks_of(work.model.layers)), 6 if work.training.checkpointing else 4
    sent = 2 * (tensor - 1) / tensor * message
    one_ms = sent / work.cluster.intra_rate * 1e3 + 2 * (tensor - 1) * work.cluster.intra_latency_ms
    return layers * count * sent * work.passes, count * one_ms
