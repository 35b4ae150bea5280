"""The exchange of gradients among replicas, in the terms of the cost model."""

from dataclasses import dataclass

from lightning_commopt.compression import METHODS, Compression, PowerSGD, Uncompressed
from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import Layout
from lightning_commopt.tuning.links import Channel, Link
from lightning_commopt.tuning.plan import CodecCost, Plan, bucket_numels

__all__ = ["GradientLink", "bytes_per_element", "codec_cost", "gradient_link", "gradient_plan", "methods_of"]

_BUCKET_MB = 25.0  # DDP's default
_BUCKET_US = 100.0  # some twenty launches of kernels
_ZERO = ("none", "bf16", "fp16", "int8", "int4", "onebit")


@dataclass(frozen=True)
class GradientLink(Link):
    """What joins replicas.

    Args:
        node_share: Bytes that a node sends to others for each byte that a rank sends of a method's messages.
        **link: As in :class:`~lightning_commopt.tuning.Link`.

    """

    node_share: float = 0.0


def methods_of(layout: Layout) -> tuple[str, ...]:
    """Return the words of the methods that a layout's strategy takes, mildest first."""
    if layout.kind == "zero":
        if layout.hpz > 1:
            return ("zero++",)
        return (*_ZERO, "zero++") if layout.stage == 3 else _ZERO
    if layout.replicas == 1:
        return ("none",)
    cuts_matrices = layout.kind == "hsdp"
    return tuple(word for word, method in METHODS.items() if word == "none" or not (cuts_matrices and method.summable))


def gradient_link(cluster: Cluster, layout: Layout, method: Compression) -> GradientLink:
    """Return what joins the replicas of a layout.

    Args:
        cluster: Where they are.
        layout: How ranks divide the work.
        method: In force.

    """
    local, ranks = cluster.local, layout.replicas
    if layout.kind in ("data", "zero"):
        return _between_all(cluster, ranks, method, may_shard=layout.kind == "data")
    if layout.kind == "hsdp":
        in_node, groups = 1, local
    else:
        in_node, groups = max(1, local // layout.ranks_per_copy), layout.tensor
    return _flat(cluster, ranks, in_node, method, groups)


def _flat(cluster: Cluster, ranks: int, in_node: int, method: Compression, groups: int = 1) -> GradientLink:
    ring = cluster.ring(ranks, in_node, groups)
    if method.summable:
        return GradientLink(ranks, ring, ring, node_share=cluster.ring_share(ranks, in_node, groups))
    share = cluster.all_to_all_share(ranks, in_node, groups)
    return GradientLink(ranks, ring, cluster.all_to_all(ranks, in_node, groups), node_share=share)


def _between_all(cluster: Cluster, ranks: int, method: Compression, *, may_shard: bool) -> GradientLink:
    local = cluster.local
    if method.summable:
        return _flat(cluster, ranks, local, method)
    if may_shard and cluster.nodes > 1 and local > 1:
        inside = Channel(cluster.intra_rate, cluster.intra_latency_ms * (local - 1))
        ring, between = cluster.ring(ranks, local), cluster.all_to_all(cluster.nodes, 1, local)
        share = cluster.all_to_all_share(cluster.nodes, 1, local)
        return GradientLink(ranks, ring, between, local, inside, share)
    return _flat(cluster, ranks, local, method)


def gradient_plan(
    model: Model, training: Training, cluster: Cluster, method: Compression, parts: int, *, at_once: bool = False
) -> Plan:
    """Return how one replica's gradients are exchanged.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        method: Of compression.
        parts: Ranks over which a copy of the model is cut.
        at_once: One bucket for all of them.

    """
    numels = [rows * columns // parts for _ in range(model.layers) for rows, columns in model.matrices]
    dense = isinstance(method, Uncompressed)
    return Plan(
        method,
        [sum(numels)] if at_once else bucket_numels(numels, _BUCKET_MB),
        codec_cost(method, cluster),
        bytes_per_element=float(training.weight_size) if dense else bytes_per_element(model, method),
        overlapped=cluster.kind == "cpu",
    )


def bytes_per_element(model: Model, method: Compression) -> float | None:
    """Return what an encoded element takes where that depends on shapes, else None.

    Low rank sends the left and the right factor in turn; this is their mean.
    """
    if not isinstance(method, PowerSGD):
        return None
    sizes = [
        4.0 * rows * columns if method.travels_exactly((rows, columns)) else 2.0 * method.rank * (rows + columns)
        for rows, columns in model.matrices
    ]
    return sum(sizes) / sum(rows * columns for rows, columns in model.matrices)


def codec_cost(method: Compression, cluster: Cluster) -> CodecCost:
    """Return what a method costs: as measured, else as if it were as fast as a device's memory, an assumption.

    Each element is read with its residual, its new residual and its payload are written; a payload is read and added;
    and a bucket is packed and unpacked once.

    Args:
        method: The method.
        cluster: The device.

    """
    if isinstance(method, Uncompressed):
        return CodecCost()
    measured = dict(cluster.codecs).get(method.name)
    if measured is not None:
        return measured
    payload = method.wire_bytes(2**20) / 2**20
    encoded, decoded = (12 if method.error_feedback else 4) + payload, 8 + payload
    extra = 0.0
    if isinstance(method, PowerSGD):
        extra = 2.0 * method.rank / (cluster.flops_per_second * cluster.utilisation) * 1e9
    rate = cluster.memory_rate * 1e-9
    return CodecCost(encoded / rate + extra, decoded / rate + extra, 16 / rate, _BUCKET_US)
