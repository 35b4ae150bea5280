"""State that waits for its step: what becomes final, and that the path without host synchronisation does the same."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_commopt.compression import ErrorFeedback
from lightning_commopt.compression.pending import PendingBuffer, Span

NAMES = ("a", "b", "c")
SPANS = [Span("a", 2, slice(0, 3), 0), Span("b", 0, slice(4, 6), 5), Span("c", 1, slice(6, 10), 0)]
NUMEL = 12


def buffer(shadow: bool = True) -> PendingBuffer:
    """Three parameters with gaps between and behind them."""
    return PendingBuffer(SPANS, NUMEL, torch.device("cpu"), shadow)


def write(state: PendingBuffer, value: float, usable: list[bool] | Tensor) -> None:
    """A round that adds `value` to every element."""
    state.update(lambda span, latest, out: torch.add(latest, value, out=out))
    state.round_done(usable)


def latest(state: PendingBuffer) -> dict[str, list[float]]:
    """What the next round would find."""
    return {span.name: state.latest(i).tolist() for i, span in enumerate(state.spans)}


def final(state: PendingBuffer) -> dict[str, float]:
    """The final value of each parameter, the same in all its elements."""
    parts = state.parts()
    assert all(len(set(values.tolist())) == 1 for pieces in parts.values() for _, values in pieces)
    return {name: float(pieces[0][1][0]) for name, pieces in parts.items()}


ALL = [True] * 3


def test_a_step_makes_pending_state_final() -> None:
    state = buffer()
    write(state, 1.0, ALL)
    assert final(state) == {"a": 0.0, "b": 0.0, "c": 0.0}
    state.commit(True, None)
    assert final(state) == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_a_skipped_step_forgets_it() -> None:
    state = buffer()
    write(state, 1.0, ALL)
    state.commit(False, None)
    write(state, 2.0, ALL)
    state.commit(True, None)
    assert final(state) == {"a": 2.0, "b": 2.0, "c": 2.0}


def test_two_rounds_before_a_step_add_up() -> None:
    state = buffer()
    write(state, 1.0, ALL)
    write(state, 2.0, ALL)
    state.commit(True, None)
    assert final(state)["a"] == 3.0


def test_a_step_of_some_parameters_leaves_the_others_pending() -> None:
    state = buffer()
    write(state, 1.0, ALL)
    state.commit(True, frozenset("a"))
    assert final(state) == {"a": 1.0, "b": 0.0, "c": 0.0}
    write(state, 2.0, ALL)
    state.commit(False, frozenset("b"))
    state.commit(True, None)
    assert final(state) == {"a": 3.0, "b": 0.0, "c": 3.0}


def test_a_result_that_reached_nobody_changes_nothing() -> None:
    state = buffer()
    write(state, 1.0, [True, False, True])  # by position in the bucket: c has index 1
    write(state, 2.0, [True, True, False])  # a has index 2
    state.commit(True, None)
    assert final(state) == {"a": 1.0, "b": 3.0, "c": 2.0}


def test_a_result_that_was_thrown_away_is_forgotten() -> None:
    state = buffer()
    write(state, 1.0, ALL)
    state.discard(lambda name: name == "b")
    write(state, 2.0, ALL)
    state.commit(True, None)
    assert final(state) == {"a": 3.0, "b": 2.0, "c": 3.0}


def test_a_round_that_does_not_write_changes_nothing() -> None:
    state = buffer()
    state.load({"a": [(0, torch.ones(3))]})
    state.round_done(ALL)
    state.commit(True, None)
    assert final(state) == {"a": 1.0, "b": 0.0, "c": 0.0}


def test_without_a_shadow_all_is_final_at_once() -> None:
    state = buffer(shadow=False)
    write(state, 1.0, ALL)
    assert final(state)["a"] == 1.0
    state.commit(True, None)
    state.clear({"b"})
    assert final(state) == {"a": 1.0, "b": 0.0, "c": 1.0}
    assert state.nbytes == 4 * NUMEL
    assert buffer().nbytes == 8 * NUMEL


@pytest.mark.parametrize("shadow", [True, False])
def test_padding_is_zero_when_it_is_encoded(shadow: bool) -> None:
    residual = ErrorFeedback(SPANS, NUMEL, torch.device("cpu"), shadow)
    for _ in range(3):
        encoded = residual.compensate(lambda span, old, out: out.fill_(1.0))
        assert encoded.tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0]
        encoded.fill_(7.0)
        residual.round_done(ALL)
        residual.commit(True, None)


def test_parts_go_where_they_belong() -> None:
    state = buffer()
    state.load({"a": [(0, torch.tensor([1.0])), (1, torch.tensor([2.0, 3.0]))], "b": [(3, torch.arange(6.0))]})
    assert {name: pieces[0][1].tolist() for name, pieces in state.parts().items()} == {
        "a": [1.0, 2.0, 3.0],
        "b": [2.0, 3.0],  # elements 5 and 6 of the parameter
        "c": [0.0] * 4,
    }
    copy = buffer()
    copy.load(state.parts())
    assert torch.equal(copy.final, state.final)
    state.parts()["a"][0][1].zero_()
    assert torch.equal(copy.final, state.final), "parts are no copy"


@dataclass(frozen=True)
class Event:
    """Something that happens to a buffer: a round, a step, or a result that is thrown away."""

    kind: str
    flags: tuple[bool, bool, bool]
    applied: bool


EVENTS = st.lists(
    st.builds(Event, st.sampled_from(["round", "step", "discard"]), st.tuples(*[st.booleans()] * 3), st.booleans()),
    max_size=12,
)


def happen(state: PendingBuffer, event: Event, value: float, as_tensor: bool) -> None:
    """Let an event happen, with verdicts on the host or as tensors."""
    names = frozenset(name for name, flag in zip(NAMES, event.flags, strict=True) if flag)
    if event.kind == "round":
        write(state, value, torch.tensor(event.flags) if as_tensor else list(event.flags))
    elif event.kind == "step":
        state.commit(torch.tensor(event.applied) if as_tensor else event.applied, names or None)
    else:
        state.discard(names.__contains__)


@given(EVENTS)
def test_verdicts_on_the_device_do_the_same(events: list[Event]) -> None:
    on_host, on_device = buffer(), buffer()
    for number, event in enumerate(events):
        happen(on_host, event, 2.0**number, as_tensor=False)
        happen(on_device, event, 2.0**number, as_tensor=True)
        assert final(on_device) == final(on_host)
        assert latest(on_device) == latest(on_host)


@given(EVENTS)
def test_what_is_final_is_what_was_delivered_and_applied(events: list[Event]) -> None:
    """A plain account of each parameter: what its rounds wrote since its last step, and what is final."""
    state = buffer()
    waiting, done = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for number, event in enumerate(events):
        happen(state, event, 2.0**number, as_tensor=False)
        chosen = {name for name, flag in zip(NAMES, event.flags, strict=True) if flag}
        for span in SPANS:
            if event.kind == "round" and event.flags[span.index]:
                waiting[span.name] += 2.0**number
            if event.kind == "step" and (not chosen or span.name in chosen):
                done[span.name] += waiting[span.name] * event.applied
                waiting[span.name] = 0.0
            if event.kind == "discard" and span.name in chosen:
                waiting[span.name] = 0.0
        assert final(state) == done
