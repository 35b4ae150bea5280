"""The policy, a pure state machine: what it may take, and when it changes its mind."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_commopt.compression import METHODS
from lightning_commopt.tuning import (
    AutoPolicy,
    AutoState,
    Channel,
    Choice,
    CodecCost,
    ComputeProfile,
    Decision,
    Evidence,
    Link,
)
from lightning_commopt.tuning.choosing import dense_buckets
from lightning_commopt.tuning.step_profile import StepTimes, merged_profile

COARSE = ("onebit", "topk", "powersgd")
NUMELS = [1024, 262_144] * 8

policies = st.builds(
    AutoPolicy,
    allow=st.lists(st.sampled_from(COARSE), unique=True),
    harshest=st.sampled_from(["none", "bf16", "int8", "int4"]),
    min_gain=st.floats(0.01, 0.3),
)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    rate, latency = draw(st.floats(1e5, 1e11)), draw(st.floats(0, 1))
    channel = Channel(rate, latency, draw(st.floats(0, 15)))
    codecs = {word: CodecCost(draw(st.floats(0, 5)), draw(st.floats(0, 5)), 1.0, 300.0) for word in METHODS}
    profile = ComputeProfile(draw(st.floats(1, 100)), draw(st.floats(1, 100)), 0.0, contention=draw(st.floats(0, 1)))
    world = draw(st.sampled_from([2, 4, 16]))
    return Evidence(profile, Link(world, channel, channel), NUMELS, (1.0, 4.0, 25.0), 25.0, codecs)


def slowed(evidence: Evidence, factor: float) -> Evidence:
    """The same on a link that is slower by a factor."""
    link = evidence.link
    slow = [replace(c, bytes_per_second=c.bytes_per_second / factor) for c in (link.reducer, link.route)]
    return replace(evidence, link=replace(link, reducer=slow[0], route=slow[1]))


def on(mbit: float, *, compute_ms: float = 40.0, world: int = 2) -> Evidence:
    """A model of 2.1 M parameters on a link, with codecs of a nanosecond."""
    channel = Channel(mbit * 1e6 / 8, 0.05, 2.0)
    codecs = {word: CodecCost(0.3, 0.2, 1.0, 300.0) for word in METHODS}
    profile = ComputeProfile(compute_ms / 2, compute_ms / 2, 0.0)
    return Evidence(profile, Link(world, channel, channel), NUMELS, (1.0, 4.0, 25.0), 25.0, codecs)


def with_long_backward() -> Evidence:
    """Buckets of 1 MB that travel nearly as long as backward takes, and a network that takes nothing from it."""
    channel = Channel(1e8, 0.05)
    profile = ComputeProfile(10.0, 200.0, 0.0)
    return replace(on(800), profile=profile, link=Link(2, channel, channel), numels=[262_144] * 16, bucket_mbs=(1.0,))


@given(policies, evidences(), evidences(), st.floats(0, 1), st.floats(0.5, 1))
def test_same_inputs_give_same_decisions_and_a_log_replays(
    policy: AutoPolicy, first: Evidence, second: Evidence, error: float, cosine: float
) -> None:
    def play() -> AutoState:
        state = AutoState().begun(policy, first, 1).chosen(policy, first, 4)
        state = state.error_measured(policy, error, cosine, 14)
        return state.link_moved().chosen(policy, second, 60, why="the bandwidth moved")

    state = play()
    assert play() == state
    saved = json.loads(json.dumps([decision.to_dict() for decision in state.decisions]))
    replayed = AutoState()
    for values in saved:
        replayed = replayed.with_decision(Decision.from_dict(values))
    assert replayed.choice == state.choice
    assert replayed.decisions == state.decisions


@given(policies, evidences())
def test_only_what_the_user_allows(policy: AutoPolicy, evidence: Evidence) -> None:
    state = AutoState().begun(policy, evidence, 1).chosen(policy, evidence, 4)
    for decision in state.decisions:
        assert decision.choice.method in ("none", *policy.methods)
        assert decision.choice.method in policy.allow or METHODS[decision.choice.method].loss_safety != "C"


@given(policies, evidences())
def test_a_choice_is_predicted_to_win_and_nothing_milder_is_as_good(policy: AutoPolicy, evidence: Evidence) -> None:
    decision = AutoState().chosen(policy, evidence, 4).decisions[-1]
    by_word = {word: ms for word, _, ms in decision.predictions}
    if decision.choice.method == "none":
        return
    assert decision.predicted_ms <= 1.01 * by_word[decision.choice.method]
    assert by_word[decision.choice.method] <= decision.dense_ms
    milder = list(by_word)[: list(by_word).index(decision.choice.method)]
    assert all(by_word[word] > 1.1 * min(by_word.values()) for word in milder)


@given(policies, evidences(), st.floats(0.98, 1.02))
def test_noise_changes_nothing(policy: AutoPolicy, evidence: Evidence, factor: float) -> None:
    state = AutoState().chosen(policy, evidence, 4)
    again = state.chosen(policy, slowed(evidence, factor), 60)
    assert again.choice == state.choice or again.choice.method == state.choice.method


@given(policies, evidences())
def test_nothing_is_chosen_where_little_is_sent(policy: AutoPolicy, evidence: Evidence) -> None:
    assume(evidence.dense.transfer_ms < policy.min_gain * evidence.dense.step_ms)
    state = AutoState().begun(policy, evidence, 1).chosen(policy, evidence, 4)
    assert state.choice == Choice()


@given(policies, evidences(), st.floats(0.21, 1))
def test_an_error_beyond_the_budget_leads_to_a_milder_method_for_good(
    policy: AutoPolicy, evidence: Evidence, error: float
) -> None:
    state = AutoState().chosen(policy, evidence, 4)
    method = state.choice.method
    back = state.error_measured(policy, error, None, 14)
    if method == "none" or method in policy.allow:
        assert back is state
        return
    order = ("none", *policy.methods)
    assert order.index(back.choice.method) < order.index(method)
    assert f"error of {method} is {error:.2f}" in back.decisions[-1].reason
    assert back.link_moved().chosen(policy, slowed(evidence, 10), 60).choice.method != method


@given(policies, evidences())
def test_buckets_stay_dense_only_where_that_costs_hardly_anything(policy: AutoPolicy, evidence: Evidence) -> None:
    choice = AutoState().chosen(policy, evidence, 4).choice
    if not choice.dense_buckets:
        return
    assert choice.dense_buckets < len(evidence.buckets(choice))
    for link in (evidence.link, evidence.link.slower(1.25)):
        on_it = replace(evidence, link=link)
        assert on_it.of(choice).step_ms <= 1.01 * on_it.of(replace(choice, dense_buckets=0)).step_ms


def test_buckets_that_are_hidden_anyway_stay_dense() -> None:
    long_backward = with_long_backward()
    bf16 = AutoState().chosen(AutoPolicy(min_gain=0.01), long_backward, 4).decisions[-1]
    buckets = len(long_backward.buckets(bf16.choice))
    assert 0 < bf16.choice.dense_buckets < buckets
    assert f"the first {bf16.choice.dense_buckets} of {buckets} buckets stay dense, hidden anyway" in bf16.reason
    all_encoded = replace(bf16.choice, dense_buckets=0)
    assert long_backward.of(bf16.choice).sent_bytes > long_backward.of(all_encoded).sent_bytes
    assert AutoState().chosen(AutoPolicy(), on(50), 4).choice.dense_buckets == 0, "the wire is never idle"


def test_the_dense_buckets_do_not_change_with_noise() -> None:
    evidence = with_long_backward()
    choice = AutoState().chosen(AutoPolicy(min_gain=0.01), evidence, 4).choice
    again = dense_buckets(slowed(evidence, 0.9), choice, choice.dense_buckets)
    assert again == choice.dense_buckets > 0
    assert dense_buckets(slowed(evidence, 1.5), choice, choice.dense_buckets) < choice.dense_buckets


def test_dense_buckets_that_cost_much_are_taken_back_until_the_link_moves() -> None:
    policy, evidence = AutoPolicy(min_gain=0.01), with_long_backward()
    state = AutoState().chosen(policy, evidence, 4)
    predicted = state.decisions[-1].predicted_ms
    assert state.gain_measured(policy, 3 * predicted, 1.1 * predicted, 14) is state
    back = state.gain_measured(policy, 3 * predicted, 1.4 * predicted, 14)
    assert back.choice == replace(state.choice, dense_buckets=0)
    assert "no bucket stays dense" in back.decisions[-1].reason
    assert back.gain_measured(policy, 3 * predicted, 1.4 * predicted, 24) is back
    assert back.chosen(policy, evidence, 60).choice.dense_buckets == 0
    assert back.link_moved().chosen(policy, evidence, 60).choice.dense_buckets == state.choice.dense_buckets


def test_slower_links_get_harsher_methods() -> None:
    policy = AutoPolicy()
    taken = [AutoState().chosen(policy, on(mbit), 4).choice.method for mbit in (1e6, 3e3, 100, 10)]
    order = ("none", *policy.methods)
    assert taken[0] == "none"
    assert taken[-1] == "int4"
    assert all(order.index(a) <= order.index(b) for a, b in pairwise(taken))


def test_int8_at_once_where_the_wire_takes_far_longer() -> None:
    policy = AutoPolicy()
    assert AutoState().begun(policy, on(100), 1).choice == Choice("int8", 1.0)
    assert AutoState().begun(policy, on(1000), 1) == AutoState()
    assert AutoState().begun(AutoPolicy(harshest="bf16"), on(100), 1) == AutoState()


def test_a_lost_choice_is_taken_back_until_the_link_moves() -> None:
    policy, slow = AutoPolicy(), on(100)
    state = AutoState().chosen(policy, slow, 4)
    assert state.gain_measured(policy, 300.0, 100.0, 14) is state
    lost = state.gain_measured(policy, 100.0, 96.0, 14)
    assert lost.choice == Choice()
    assert "taken back" in lost.decisions[-1].reason
    assert state.choice.method not in [word for word, _, _ in lost.chosen(policy, slow, 60).decisions[-1].predictions]
    assert lost.link_moved().chosen(policy, on(20), 60).choice.method == "int4"


def test_a_mean_far_from_the_dense_one_leads_to_a_milder_method() -> None:
    policy = AutoPolicy()
    state = AutoState().chosen(policy, on(100), 4)
    assert state.error_measured(policy, 0.1, 0.99, 14) is state
    assert state.error_measured(policy, 0.1, 0.9, 14).choice.method == "int8"


def test_what_does_not_fit_is_not_chosen() -> None:
    tight = replace(on(100), too_large=frozenset({"int4", "int8"}))
    assert AutoState().begun(AutoPolicy(), tight, 1).chosen(AutoPolicy(), tight, 4).choice.method == "bf16"


def test_a_slow_rank_is_no_slow_link() -> None:
    """All wait for the last rank, and its computing is the step's, whatever the others waited."""
    quick = [StepTimes(20.0, 20.0, 500.0, ((10, 20.0),))] * 3
    slow = [StepTimes(250.0, 250.0, 251.0, ((10, 250.0),))] * 3
    profile = merged_profile([quick, slow, quick], 1.0)
    assert (profile.forward_ms, profile.backward_ms) == (250.0, 250.0)
    assert AutoState().chosen(AutoPolicy(), replace(on(2000), profile=profile), 4).choice == Choice()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"allow": ["int8"]}, r"`allow=\['int8'\]` must be a list of some of 'onebit'"),
        ({"allow": "onebit"}, "`allow='onebit'` must be a list"),
        ({"harshest": "onebit"}, "`harshest='onebit'` must be one of 'none', 'bf16', 'int8', 'int4'; `allow` is"),
        ({"error_budget": 0}, "`error_budget=0` must be between 0 and 1"),
        ({"min_gain": "much"}, "`min_gain='much'` must be between"),
        ({"measure_steps": 0}, "`measure_steps=0` must be an int >= 1"),
        ({"check_every": 4}, "`check_every=4` must be an int >= 5"),
        ({"redecide_every": -1}, "`redecide_every=-1` must be an int >= 0"),
        ({"cosine_every": 0.5}, "`cosine_every=0.5` must be an int >= 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AutoPolicy(**options)  # type: ignore[arg-type]
