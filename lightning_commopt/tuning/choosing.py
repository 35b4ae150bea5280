"""Which way to exchange gradients is the mildest that hides the communication: pure functions of the evidence."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_commopt.compression import METHODS
from lightning_commopt.tuning.cost_model import Prediction
from lightning_commopt.tuning.decision import Choice
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.policy import AutoPolicy

__all__ = ["InForce", "Options", "choose", "considered", "dense_buckets", "rate_in_words", "why_chosen"]

_NEAR_BEST = 1.10  # a milder method may take this much longer than the fastest
_HIDDEN = 0.05  # part of a step that may be exposed where communication counts as hidden
_MILDER = 1.05  # to change to a milder method, it may take this much longer than the one in force
_HARSHER = 1.20  # to change to a harsher one, the one in force must take this much longer
_HARDLY = 1.01  # a step may take this much longer for buckets that stay dense
_SLOWER = 1.25  # on a link that is slower by so much too: a smaller change gives no occasion to choose again

Options = Mapping[str, tuple[Choice, Prediction]]
"""By a method's word, the best that can be done with it."""


@dataclass(frozen=True)
class InForce:
    """What a new choice replaces.

    Args:
        choice: In force.
        is_chosen: Whether it rests on evidence; else nothing speaks for keeping it.

    """

    choice: Choice
    is_chosen: bool


def considered(policy: AutoPolicy, evidence: Evidence, barred: frozenset[str], bucket_mb: float | None) -> Options:
    """Return each method with the size of buckets that suits it best, mildest first.

    Args:
        policy: What the user wants.
        evidence: What was measured.
        barred: Methods that may not be taken.
        bucket_mb: The size of buckets in force, which stays: they change once at most. None to choose.

    """
    return {"none": (Choice(), evidence.dense)} | dict(_compressed(policy, evidence, barred, bucket_mb))


def _compressed(
    policy: AutoPolicy, evidence: Evidence, barred: frozenset[str], bucket_mb: float | None
) -> Iterator[tuple[str, tuple[Choice, Prediction]]]:
    sizes = evidence.bucket_mbs if bucket_mb is None else (bucket_mb,)
    for word in policy.methods:
        if word not in barred | evidence.too_large:
            told = [(option, evidence.of(option)) for option in (Choice(word, size) for size in sizes)]
            yield word, min(told, key=lambda pair: pair[1].step_ms)


def choose(policy: AutoPolicy, evidence: Evidence, options: Options, in_force: InForce) -> Choice:
    """Return the mildest option that hides the communication, with hysteresis towards what is in force."""
    dense = options["none"][1]
    best = min(told.step_ms for _, told in options.values())
    little_sent = dense.transfer_ms < policy.min_gain * dense.step_ms  # latency alone is no reason for a method
    if little_sent or best > (1 - policy.min_gain) * dense.step_ms:
        chosen = Choice()
    else:
        chosen = next(  # mildest first
            option
            for option, told in options.values()
            if told.exposed_ms <= _HIDDEN * told.step_ms or told.step_ms <= _NEAR_BEST * best
        )
    chosen = _with_hysteresis(policy, chosen, options, in_force)
    if chosen.method == "none":
        return chosen
    before = in_force.choice.dense_buckets if in_force.is_chosen and chosen.method == in_force.choice.method else 0
    return replace(chosen, dense_buckets=dense_buckets(evidence, chosen, before))


def _with_hysteresis(policy: AutoPolicy, chosen: Choice, options: Options, in_force: InForce) -> Choice:
    """Keep the method that is in force unless the change is worth it."""
    current = in_force.choice.method
    if not in_force.is_chosen or current not in options or chosen.method == current:
        return chosen
    order = ("none", *policy.methods)
    now_ms, then_ms = options[current][1].step_ms, options[chosen.method][1].step_ms
    harsher = order.index(chosen.method) > order.index(current)
    worth_it = now_ms > _HARSHER * then_ms if harsher else then_ms <= _MILDER * now_ms
    return chosen if worth_it else options[current][0]


def dense_buckets(evidence: Evidence, choice: Choice, before: int = 0) -> int:
    """Return how many buckets, in the order in which they become ready, may stay dense since they are hidden anyway.

    A bucket delays all that come after it, so those that are ready first are hidden best. The step may take hardly
    longer than with all of them compressed, also where the link becomes a little slower.

    Args:
        evidence: What was measured.
        choice: The method and the size of buckets.
        before: So many are dense now; they stay so unless twice as many may be, or so many may not.

    """
    links = [evidence, replace(evidence, link=evidence.link.slower(_SLOWER))]
    allowed_ms = [_HARDLY * one.of(replace(choice, dense_buckets=0)).step_ms for one in links]

    def is_hidden(count: int) -> bool:
        told = (one.of(replace(choice, dense_buckets=count)).step_ms for one in links)
        return all(ms <= allowed for ms, allowed in zip(told, allowed_ms, strict=True))

    low, high = 0, len(evidence.buckets(choice)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_hidden(middle) else (low, middle - 1)
    return before if before <= low < 2 * before else low


def why_chosen(policy: AutoPolicy, evidence: Evidence, options: Options, choice: Choice) -> str:
    """Return in words what speaks for a choice."""
    dense = options["none"][1]
    if choice.method != "none":
        words = f"{choice.method} predicted {dense.step_ms / evidence.of(choice).step_ms:.1f}x; "
        if choice.dense_buckets:
            buckets = len(evidence.buckets(choice))
            words += f"the first {choice.dense_buckets} of {buckets} buckets stay dense, hidden anyway; "
        return words + f"loss-safe class {METHODS[choice.method].loss_safety}"
    others = {word: told.step_ms for word, (_, told) in options.items() if word != "none"}
    if not others or dense.transfer_ms < policy.min_gain * dense.step_ms:
        return "nothing to win: DDP's own reducer"
    best = min(others, key=lambda word: others[word])
    return f"the best, {best}, predicted {dense.step_ms / others[best]:.2f}x: not worth it, DDP's own reducer"


def rate_in_words(link: Link) -> str:
    """Return the rate of the slowest link in words."""
    channel = (
        link.route if link.ranks_per_node > 1 else min(link.route, link.reducer, key=lambda c: -c.bytes_per_second)
    )
    bits = channel.bytes_per_second * 8
    where = "nodes" if link.ranks_per_node > 1 else "ranks"
    number = f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
    return f"{number} between {where}"
