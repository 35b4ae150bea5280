"""Every schedule, in many sizes."""

from hypothesis import strategies as st

from lightning_commopt.pipeline import Schedule, gpipe, one_f_one_b

__all__ = ["schedules"]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    return draw(st.sampled_from([gpipe, one_f_one_b]))(stages, microbatches)
