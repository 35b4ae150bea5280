"""Every schedule, in many sizes."""

from collections.abc import Iterator

from hypothesis import strategies as st

from lightning_commopt.pipeline import Schedule, ScheduleName, schedule_named

__all__ = ["FAMILIES", "every_size", "schedules"]

FAMILIES: list[tuple[ScheduleName, int | None]] = [
    ("gpipe", None),
    ("1f1b", None),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zbv", None),
]


def every_size(name: ScheduleName, per_rank: int | None) -> Iterator[Schedule]:
    """All schedules of a family on up to 6 ranks, with up to 12 microbatches."""
    for ranks in range(1, 7):
        for microbatches in range(1, 13):
            yield schedule_named(name, ranks, microbatches, per_rank)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Larger ones, too."""
    name, per_rank = draw(st.sampled_from(FAMILIES))
    return schedule_named(name, draw(st.integers(1, 9)), draw(st.integers(1, 30)), per_rank)
