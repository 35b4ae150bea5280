"""What the exchange of one bucket takes from the links and from the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from lightning_commopt.compression import Uncompressed
from lightning_commopt.compression.layout import round_up
from lightning_commopt.tuning.links import Channel, Link
from lightning_commopt.tuning.plan import CodecCost, Plan
from lightning_commopt.tuning.timeline import Leg

__all__ = ["BucketCost", "bucket_costs"]


@dataclass(frozen=True)
class BucketCost:
    """One bucket.

    Args:
        legs: Work and messages, one after the other.
        codec_ms: Time of the device.
        stolen_ms: Time that the network takes from computing.
        sent_bytes: That a rank sends.
        transfer_ms: Time for which bytes alone keep the links busy.

    """

    legs: tuple[Leg, ...]
    codec_ms: float
    stolen_ms: float
    sent_bytes: float
    transfer_ms: float


@dataclass(frozen=True)
class _Travel:
    """Messages on their way.

    Args:
        channel: By which they go.
        nbytes: That a rank sends.
        hops: Messages one after the other.
        waited: Whether nothing else is done until they are there.

    """

    channel: Channel
    nbytes: float
    hops: int
    waited: bool = False

    def after(self, work_ms: float) -> Leg:
        """Return the leg that begins with some work."""
        busy_ms = self.channel.wire_ms(self.nbytes, 0)
        latency_ms = self.channel.wire_ms(self.nbytes, self.hops) - busy_ms
        return Leg(work_ms, busy_ms, latency_ms, self.waited, self.nbytes)


def bucket_costs(link: Link, plan: Plan) -> list[BucketCost]:
    """Return the cost of each bucket of a plan."""
    dense, rest = plan.bucket_numels[: plan.dense_buckets], plan.bucket_numels[plan.dense_buckets :]
    cost = _by_own_reducer if isinstance(plan.method, Uncompressed) else _encoded
    return [_dense(numel, link, plan.dense_codec) for numel in dense] + [cost(numel, link, plan) for numel in rest]


def _by_own_reducer(numel: int, link: Link, plan: Plan) -> BucketCost:
    """DDP's: gloo and NCCL cut a bucket into pieces that follow one another round the ring."""
    nbytes = 2 * (link.world - 1) / link.world * numel * (plan.bytes_per_element or 4)
    travel = _Travel(link.reducer, nbytes, 2 * (link.world - 1))
    return _cost([(_codec_ms(plan.codec, numel, 0, 0), travel)], 0.0)


def _encoded(numel: int, link: Link, plan: Plan) -> BucketCost:
    """By the route of the method."""
    peers, shard = link.world // link.ranks_per_node, ceil(numel / link.ranks_per_node)
    one_way = shard * plan.bytes_per_element if plan.bytes_per_element is not None else _encoded_bytes(plan, shard)
    codec, half = plan.codec, _codec_ms(plan.codec, numel / 2, 0, 0, 0.5)
    encode_ms, decode_ms = codec.encode_ns * shard * 1e-6, codec.decode_ns * shard * 1e-6
    hop = _Travel(link.route, (peers - 1) / peers * one_way, 1)
    if plan.method.summable:
        ring = _Travel(link.route, 2 * hop.nbytes, 2 * (peers - 1), waited=True)
        legs, last_ms = [(half + encode_ms, ring)], decode_ms + half
    elif peers <= 2:
        both = _Travel(link.route, (peers - 1) * one_way, 1)
        legs, last_ms = [(half + encode_ms, both)], peers * decode_ms + half
    else:
        legs, last_ms = [(half + encode_ms, hop), (decode_ms + encode_ms / peers, hop)], decode_ms + half
    return _cost(legs, last_ms, _inside(link, numel))


def _dense(numel: int, link: Link, codec: CodecCost) -> BucketCost:
    """Densely beside compressed ones: an all-reduce on their way."""
    peers, shard = link.world // link.ranks_per_node, ceil(numel / link.ranks_per_node)
    channel = link.reducer if link.ranks_per_node == 1 else link.route
    ring = _Travel(channel, 2 * (peers - 1) / peers * 4 * shard, 2 * (peers - 1), waited=True)
    halves = [_codec_ms(codec, numel / 2, *each, 0.5) for each in ((shard, 0), (0, shard))]
    return _cost([(halves[0], ring)], halves[1], _inside(link, numel))


def _inside(link: Link, numel: int) -> _Travel | None:
    """Return what travels inside a node before the others, and again after them."""
    if link.inside is None or link.ranks_per_node == 1:
        return None
    return _Travel(link.inside, (link.ranks_per_node - 1) / link.ranks_per_node * 4 * numel, 1, waited=True)


def _encoded_bytes(plan: Plan, numel: int) -> float:
    """Return the bytes that so many elements become, by the method alone."""
    packed = round_up(round(numel * (1 - plan.exact_fraction)), plan.method.alignment)
    return plan.method.wire_bytes(packed) + 4 * numel * plan.exact_fraction


def _codec_ms(codec: CodecCost, numel: float, encoded: float, decoded: float, buckets: float = 1.0) -> float:
    nanoseconds = codec.handling_ns * numel + codec.encode_ns * encoded + codec.decode_ns * decoded
    return nanoseconds * 1e-6 + codec.bucket_us * buckets * 1e-3


def _cost(legs: Sequence[tuple[float, _Travel]], last_ms: float, inside: _Travel | None = None) -> BucketCost:
    """Add up legs of work and messages, the last work, and what travels inside the node around them."""
    travels = [travel for _, travel in legs] + ([inside, inside] if inside is not None else [])
    inside_ms = 0.0 if inside is None else inside.after(0.0).total_ms
    first, *others = [travel.after(work_ms) for work_ms, travel in legs]
    return BucketCost(
        legs=(replace(first, work_ms=first.work_ms + inside_ms), *others, Leg(last_ms + inside_ms)),
        codec_ms=sum(work_ms for work_ms, _ in legs) + last_ms,
        stolen_ms=sum(travel.channel.stolen_ms(travel.nbytes) for travel in travels),
        sent_bytes=sum(travel.nbytes for travel in travels),
        transfer_ms=sum(travel.channel.wire_ms(travel.nbytes, 0) for travel in travels),
    )
