"""What the cost model promises, whatever the numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.links import bound
from lightning_commopt.compression import BF16, Compression, Int4, Int8, Uncompressed
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Link, Plan, bucket_numels, predict
from lightning_commopt.tuning.timeline import Leg, last_end_ms, last_end_overlapped_ms

METHODS: list[Compression] = [Uncompressed(), BF16(), Int8(), Int4()]

channels = st.builds(
    Channel,
    bytes_per_second=st.floats(1e5, 1e11),
    latency_ms=st.floats(0, 5),
    stolen_ns_per_byte=st.floats(0, 20),
)
costs = st.builds(CodecCost, *[st.floats(0, 30)] * 3, bucket_us=st.floats(0, 500))
profiles = st.builds(ComputeProfile, *[st.floats(0.1, 1e3)] * 3, contention=st.sampled_from([0.0, 0.5, 1.0]))
sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=8)


@st.composite
def links(draw: st.DrawFn) -> Link:
    nodes, size = draw(st.integers(2, 8)), draw(st.sampled_from([1, 1, 4]))
    return Link(nodes * size, draw(channels), draw(channels), size, draw(channels) if size > 1 else None)


@given(profiles, links(), sizes, costs, st.sampled_from(METHODS), st.booleans())
def test_nothing_is_faster_than_computing_or_sending(
    profile: ComputeProfile, link: Link, numels: list[int], codec: CodecCost, method: Compression, overlapped: bool
) -> None:
    told = predict(profile, link, Plan(method, numels, codec, overlapped=overlapped))
    alone = profile.forward_ms + profile.optimizer_ms
    assert told.step_ms >= profile.step_ms * (1 - 1e-9)
    if not (overlapped and link.inside):  # what travels between nodes does so beside what travels inside them
        assert told.step_ms >= (alone + told.transfer_ms) * (1 - 1e-9)
    assert told.step_ms >= (alone + told.codec_ms) * (1 - 1e-9)
    assert told.exposed_ms == pytest.approx(told.step_ms - profile.step_ms)


@given(profiles, links(), sizes, costs, st.sampled_from(METHODS), st.floats(1.0, 100.0), st.booleans())
def test_a_slower_link_never_makes_a_faster_step(
    profile: ComputeProfile,
    link: Link,
    numels: list[int],
    codec: CodecCost,
    method: Compression,
    factor: float,
    overlapped: bool,
) -> None:
    slow = [replace(c, bytes_per_second=c.bytes_per_second / factor) for c in (link.reducer, link.route)]
    plan = Plan(method, numels, codec, overlapped=overlapped)
    slower = replace(link, reducer=slow[0], route=slow[1])
    assert predict(profile, slower, plan).step_ms >= predict(profile, link, plan).step_ms * (1 - 1e-9)


@given(profiles, links(), st.integers(1, 10**7), costs, st.sampled_from(METHODS))
def test_one_bucket_overlaps_with_nothing(
    profile: ComputeProfile, link: Link, numel: int, codec: CodecCost, method: Compression
) -> None:
    alone, overlapped = (Plan(method, [numel], codec, overlapped=overlaps) for overlaps in (False, True))
    told = predict(profile, link, overlapped).step_ms
    assert told == pytest.approx(predict(profile, link, alone).step_ms)


def test_buckets_are_worked_on_while_others_travel() -> None:
    two_hops = [Leg(1, 10), Leg(1, 10), Leg(1)]
    assert last_end_ms([0, 0], [two_hops, two_hops]) == 46
    assert last_end_overlapped_ms([0, 0], [two_hops, two_hops]) == 1 + 4 * 10 + 1
    late = [Leg(1, 10, latency_ms=5, waited=True), Leg(1)]
    assert last_end_overlapped_ms([0, 3], [late, two_hops]) == last_end_ms([0, 3], [late, two_hops])
    assert last_end_ms([0, 100], [two_hops, two_hops]) == 123
    assert last_end_overlapped_ms([0, 100], [two_hops, two_hops]) == 132, (
        "the first hop of a bucket moves the others on"
    )


@given(profiles, links(), sizes, costs, st.data())
def test_a_dense_bucket_sends_four_bytes_an_element(
    profile: ComputeProfile, link: Link, numels: list[int], codec: CodecCost, data: st.DataObject
) -> None:
    flat, count = replace(link, ranks_per_node=1, inside=None), data.draw(st.integers(0, len(numels) - 1))
    plan = Plan(Int8(), numels, codec, dense_buckets=count, overlapped=True)
    told = predict(profile, flat, plan)
    dense_bytes = 2 * (flat.world - 1) / flat.world * 4 * sum(numels[:count])
    rest = replace(plan, bucket_numels=numels[count:], dense_buckets=0)
    assert told.sent_bytes == pytest.approx(dense_bytes + predict(profile, flat, rest).sent_bytes)


@given(links(), sizes)
def test_a_harsher_method_sends_less(link: Link, numels: list[int]) -> None:
    numels = [numel * 512 for numel in numels]  # below some blocks, padding weighs more than bits
    flat = replace(link, ranks_per_node=1, inside=None)
    profile = ComputeProfile(1, 1, 1)
    sent = [predict(profile, flat, Plan(method, numels)).sent_bytes for method in METHODS]
    assert all(harsher < milder for milder, harsher in pairwise(sent))
    assert sent[0] == pytest.approx(2 * (flat.world - 1) / flat.world * 4 * sum(numels))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.floats(0.01, 30))
def test_buckets_hold_everything_once(numels: list[int], bucket_mb: float) -> None:
    buckets = bucket_numels(numels, bucket_mb)
    assert sum(buckets) == sum(numels)
    assert all(bucket > 0 for bucket in buckets)


def test_it_is_the_benchmarks_bound_where_codecs_are_free() -> None:
    ready = [(10_000, 8.0), (10_200, 19.0)]
    profile = ComputeProfile(10, 20, 5, ready)
    channel = Channel(1e6, 0.5)
    told = predict(profile, Link(2, channel, channel), Plan(Uncompressed(), [10_000, 200]))
    expected = bound.shortest_step_ms(profile, bound.Link(8e6, 0.5), told.sent_bytes, [10_000, 200], hops=2)
    assert told.step_ms == pytest.approx(expected)


def test_codec_and_network_delay_computing_on_a_shared_core() -> None:
    channel = Channel(1e12, 0.0, stolen_ns_per_byte=10.0)
    plan = Plan(Int8(), [1_000_000], CodecCost(encode_ns=2.0, decode_ns=1.0, handling_ns=3.0, bucket_us=100.0))
    told = predict(ComputeProfile(10, 20, 5), Link(2, channel, channel), plan)
    codec_ms = 2 + 2 * 1 + 3 + 0.1  # each of two ranks decodes both payloads
    assert told.codec_ms == pytest.approx(codec_ms, rel=1e-3)
    assert told.exposed_ms == pytest.approx(codec_ms + 10 * told.sent_bytes * 1e-6, rel=1e-3)
    alone = predict(
        ComputeProfile(10, 20, 5, contention=0.0), Link(2, channel, replace(channel, stolen_ns_per_byte=0)), plan
    )
    assert alone.exposed_ms == pytest.approx(codec_ms, rel=1e-2), "after backward nothing hides the last bucket"
