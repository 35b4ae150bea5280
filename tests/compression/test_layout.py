"""Where parameters lie in a packed bucket, for any shapes."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_commopt.compression import BucketLayout, Parameter
from lightning_commopt.compression.layout import gaps_between, round_up
from lightning_commopt.compression.pending import spans_of

SHAPES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=10)


def layout_of(shapes: list[tuple[int, ...]], exact: list[bool], alignment: int, owners: int) -> BucketLayout:
    """A layout of parameters p0, p1, ..."""
    named = zip(shapes, exact, strict=False)
    return BucketLayout([Parameter(f"p{i}", s, e) for i, (s, e) in enumerate(named)], alignment, owners)


LAYOUTS = st.builds(
    layout_of,
    SHAPES,
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 5),
)


@given(LAYOUTS)
def test_every_element_has_one_place(layout: BucketLayout) -> None:
    in_bucket = [i for s in layout.segments for i in range(s.in_bucket.start, s.in_bucket.stop)]
    assert in_bucket == list(range(layout.numel))
    for segments, numel in ((layout.compressed, layout.packed_numel), (layout.exact, layout.exact_numel)):
        taken = [i for s in segments for i in range(s.packed.start, s.packed.stop)]
        gaps = [i for gap in gaps_between([s.packed for s in segments], numel) for i in range(gap.start, gap.stop)]
        assert taken == sorted(taken)
        assert sorted(taken + gaps) == list(range(numel))
    assert sorted(s.index for s in layout.compressed + layout.exact) == list(range(len(layout.segments)))


@given(LAYOUTS, st.sampled_from([1, 8, 64]))
def test_no_block_crosses_a_border(layout: BucketLayout, block: int) -> None:
    aligned = BucketLayout([s.parameter for s in layout.segments], block, layout.owners)
    assert all(s.packed_offset % block == 0 for s in aligned.compressed)
    assert aligned.chunk % block == 0
    assert aligned.packed_numel == aligned.chunk * aligned.owners
    waste = aligned.packed_numel - sum(round_up(s.parameter.numel, block) for s in aligned.compressed)
    assert 0 <= waste < block * aligned.owners


@given(LAYOUTS)
def test_owners_spans_make_up_every_parameter(layout: BucketLayout) -> None:
    covered: dict[str, list[int]] = {s.parameter.name: [] for s in layout.compressed}
    for owner in range(layout.owners):
        start = owner * layout.chunk
        for span in spans_of(layout, start, layout.chunk):
            assert span.name == f"p{span.index}"
            covered[span.name] += range(span.first, span.first + span.numel)
            segment = layout.segments[span.index]
            assert start + span.buffer.start == segment.packed_offset + span.first
    assert covered == {s.parameter.name: list(range(s.parameter.numel)) for s in layout.compressed}
