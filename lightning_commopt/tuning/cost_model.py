"""How long a step will take under a plan: pure functions of what was measured."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.compression.layout import round_up

__all__ = ["Channel", "CodecCost", "ComputeProfile", "Link", "Plan", "Prediction", "bucket_numels", "predict"]

_MB = 2**20
_FIRST_BUCKET_BYTES = 1024 * 1024  # DDP makes its first bucket this small whatever the cap is


@dataclass(frozen=True)
class Channel:
    """What a way of travelling costs a rank, measured with the same operations that a step will use.

    Args:
        bytes_per_second: That a rank sends while all ranks send.
        latency_ms: Of one message that carries nothing.
        stolen_ns_per_byte: Time by which computing is delayed for each byte that is sent beside it: on a CPU the
            network's own work runs on the cores that compute.

    """

    bytes_per_second: float
    latency_ms: float
    stolen_ns_per_byte: float = 0.0

    def slower(self, factor: float) -> "Channel":
        """Return a channel on which everything takes ``factor`` times as long."""
        return Channel(self.bytes_per_second / factor, self.latency_ms * factor, self.stolen_ns_per_byte * factor)

    def wire_ms(self, nbytes: float, hops: int) -> float:
        """Time to send ``nbytes`` in ``hops`` messages, one after the other."""
        return nbytes / self.bytes_per_second * 1e3 + hops * self.latency_ms

    def stolen_ms(self, nbytes: float) -> float:
        """Time by which computing is delayed."""
        return nbytes * self.stolen_ns_per_byte * 1e-6


@dataclass(frozen=True)
class Link:
    """What joins the ranks.

    Args:
        world: Number of ranks.
        reducer: All-reduce over all ranks, as DDP's own reducer uses it.
        route: Messages of encoded gradients: between all ranks, or between nodes where the exchange is hierarchical.
        ranks_per_node: Ranks that reduce inside their node first; 1: the exchange is flat.
        inside: Messages inside a node, where the exchange is hierarchical.

    """

    world: int
    reducer: Channel
    route: Channel
    ranks_per_node: int = 1
    inside: Channel | None = None

    def slower(self, factor: float) -> "Link":
        """Return a link on which everything takes ``factor`` times as long."""
        inside = None if self.inside is None else self.inside.slower(factor)
        return Link(self.world, self.reducer.slower(factor), self.route.slower(factor), self.ranks_per_node, inside)


@dataclass(frozen=True)
class ComputeProfile:
    """A step without exchange, ms.

    Args:
        forward_ms: Everything before backward.
        backward_ms: From the beginning of backward until its last gradient is there.
        optimizer_ms: Everything after backward.
        ready: ``(elements, ms)``: how many gradients are there how long after the beginning of backward, ascending.
            Empty: gradients arrive evenly.
        contention: Part of a codec's time by which computing is delayed: 1 where both share a core (or a GPU), 0 where
            the codec has a core of its own.

    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    ready: Sequence[tuple[int, float]] = ()
    contention: float = 1.0

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    def ready_ms(self, numel: int, total: int) -> float:
        """Time from the beginning of backward until the first ``numel`` of ``total`` gradients are there."""
        if not self.ready:
            return self.backward_ms * numel / total
        place = bisect_left([elements for elements, _ in self.ready], numel)
        return min(self.ready[min(place, len(self.ready) - 1)][1], self.backward_ms)


@dataclass(frozen=True)
class CodecCost:
    """What a method costs on a device.

    Args:
        encode_ns: An element that is encoded.
        decode_ns: An element that is decoded and added.
        handling_ns: An element of a bucket, for all else: packing, residual, flags, unpacking.
        bucket_us: A bucket, whatever its size.

    """

    encode_ns: float = 0.0
    decode_ns: float = 0.0
    handling_ns: float = 0.0
    bucket_us: float = 0.0


@dataclass(frozen=True)
class Plan:
    """How gradients are exchanged.

    Args:
        method: What travels. :class:`~lightning_commopt.Uncompressed` means DDP's own reducer.
        bucket_numels: Elements in each bucket, in the order in which buckets become ready (:func:`bucket_numels`).
        codec: What the method costs here.
        exact_fraction: Part of the elements that travels exactly.
        bytes_per_element: Encoded, exact elements included, where that is known better than from the method alone:
            low rank depends on shapes.
        dense_buckets: So many of the first buckets travel densely on the same path.
        dense_codec: What handling these costs here.

    """

    method: Compression
    bucket_numels: Sequence[int]
    codec: CodecCost = CodecCost()
    exact_fraction: float = 0.0
    bytes_per_element: float | None = None
    dense_buckets: int = 0
    dense_codec: CodecCost = CodecCost()


@dataclass(frozen=True)
class Prediction:
    """What a plan will give.

    Args:
        step_ms: Duration of a step.
        exposed_ms: Its excess over the same step without exchange.
        sent_bytes: That a rank sends a step, inside nodes and between them.
        transfer_ms: Time for which bytes alone keep the links busy, latency not counted.
        codec_ms: Time spent encoding, decoding, packing.

    """

    step_ms: float
    exposed_ms: float
    sent_bytes: float
    transfer_ms: float
    codec_ms: float


@dataclass(frozen=True)
class _BucketCost:
    """One bucket: time on the wire, in the codec, taken from computing; bytes."""

    wire_ms: float
    codec_ms: float
    stolen_ms: float
    sent_bytes: float
    transfer_ms: float


def predict(profile: ComputeProfile, link: Link, plan: Plan) -> Prediction:
    """Return what a step will take.

    Buckets become ready at ``r_j`` and are exchanged one after the other; each takes ``C_j`` in the codec and ``W_j``
    on the wire. Computing is delayed by what codec and network take from its core::

        E_j = max(r_j, E_{j-1}) + C_j + W_j
        T   = T_fwd + T_opt + max(E_K, T_bwd + sum_j (contention C_j + stolen_j))

    Args:
        profile: A step without exchange.
        link: The network.
        plan: How gradients are exchanged.

    """
    total, there, end = sum(plan.bucket_numels), 0, 0.0
    dense, compressed = plan.bucket_numels[: plan.dense_buckets], plan.bucket_numels[plan.dense_buckets :]
    costs = [_dense_cost(numel, link, plan.dense_codec) for numel in dense]
    costs += [_bucket_cost(numel, link, plan) for numel in compressed]
    for numel, cost in zip(plan.bucket_numels, costs, strict=True):
        there += numel
        end = max(end, profile.ready_ms(there, total)) + cost.codec_ms + cost.wire_ms
    taken = sum(profile.contention * cost.codec_ms + cost.stolen_ms for cost in costs)
    step_ms = profile.forward_ms + profile.optimizer_ms + max(end, profile.backward_ms + taken)
    return Prediction(
        step_ms=step_ms,
        exposed_ms=step_ms - profile.step_ms,
        sent_bytes=sum(cost.sent_bytes for cost in costs),
        transfer_ms=sum(cost.transfer_ms for cost in costs),
        codec_ms=sum(cost.codec_ms for cost in costs),
    )


def bucket_numels(numels: Sequence[int], bucket_mb: float, *, pinned: bool = True) -> list[int]:
    """Return the elements in each of DDP's buckets of fp32 gradients, about in the order in which they become ready.

    Args:
        numels: Elements of each parameter, in the module's order.
        bucket_mb: DDP's ``bucket_cap_mb``.
        pinned: As the lossy methods lay buckets out; stock DDP does the same after its first backward.

    """
    buckets: list[int] = []
    filling = 0
    for numel in reversed(numels):
        filling += numel
        cap = min(_FIRST_BUCKET_BYTES, bucket_mb * _MB) if not buckets and pinned else bucket_mb * _MB
        if 4 * filling >= cap:
            buckets.append(filling)
            filling = 0
    return [*buckets, filling] if filling or not buckets else buckets


def _bucket_cost(numel: int, link: Link, plan: Plan) -> _BucketCost:
    if isinstance(plan.method, Uncompressed):
        nbytes = 2 * (link.world - 1) / link.world * numel * (plan.bytes_per_element or 4)
        # gloo and NCCL cut a bucket into pieces that follow one another round the ring
        return _cost([(link.reducer, nbytes, 2 * (link.world - 1))], _codec_ms(plan.codec, numel, 0, 0))
    peers, shard = link.world // link.ranks_per_node, ceil(numel / link.ranks_per_node)
    one_way = shard * plan.bytes_per_element if plan.bytes_per_element is not None else _encoded_bytes(plan, shard)
    travels = []
    if plan.method.summable:
        travels.append((link.route, 2 * (peers - 1) / peers * one_way, 2 * (peers - 1)))
        encoded, decoded = 1.0, 1.0
    elif peers <= 2:
        travels.append((link.route, (peers - 1) * one_way, 1))
        encoded, decoded = 1.0, float(peers)
    else:
        travels.append((link.route, 2 * (peers - 1) / peers * one_way, 2))
        encoded, decoded = 1 + 1 / peers, 2.0
    travels += _inside(link, numel)
    return _cost(travels, _codec_ms(plan.codec, numel, encoded * shard, decoded * shard))


def _dense_cost(numel: int, link: Link, codec: CodecCost) -> _BucketCost:
    """Return what a bucket costs that travels densely beside compressed ones: an all-reduce on their way."""
    peers, shard = link.world // link.ranks_per_node, ceil(numel / link.ranks_per_node)
    channel = link.reducer if link.ranks_per_node == 1 else link.route
    travels = [(channel, 2 * (peers - 1) / peers * 4 * shard, 2 * (peers - 1)), *_inside(link, numel)]
    return _cost(travels, _codec_ms(codec, numel, shard, shard))


def _inside(link: Link, numel: int) -> list[tuple[Channel, float, int]]:
    """Return what travels inside a node for a bucket."""
    if link.inside is None or link.ranks_per_node == 1:
        return []
    return [(link.inside, 2 * (link.ranks_per_node - 1) / link.ranks_per_node * 4 * numel, 2)]


def _encoded_bytes(plan: Plan, numel: int) -> float:
    """Return the bytes that so many elements become, by the method alone."""
    packed = round_up(round(numel * (1 - plan.exact_fraction)), plan.method.alignment)
    return plan.method.wire_bytes(packed) + 4 * numel * plan.exact_fraction


def _codec_ms(codec: CodecCost, numel: int, encoded: float, decoded: float) -> float:
    nanoseconds = codec.handling_ns * numel + codec.encode_ns * encoded + codec.decode_ns * decoded
    return nanoseconds * 1e-6 + codec.bucket_us * 1e-3


def _cost(travels: Sequence[tuple[Channel, float, int]], codec_ms: float) -> _BucketCost:
    return _BucketCost(
        wire_ms=sum(channel.wire_ms(nbytes, hops) for channel, nbytes, hops in travels),
        codec_ms=codec_ms,
        stolen_ms=sum(channel.stolen_ms(nbytes) for channel, nbytes, _ in travels),
        sent_bytes=sum(nbytes for _, nbytes, _ in travels),
        transfer_ms=sum(channel.wire_ms(nbytes, 0) for channel, nbytes, _ in travels),
    )
