"""Which method to take: a pure state machine. The same inputs give the same decisions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_commopt.compression import METHODS, method_named
from lightning_commopt.tuning.cost_model import (
    CodecCost,
    ComputeProfile,
    Link,
    Plan,
    Prediction,
    bucket_numels,
    predict,
)
from lightning_commopt.tuning.decision import Choice, Decision

__all__ = ["AutoPolicy", "AutoState", "Evidence"]

_SAFE = ("bf16", "int8", "int4")  # mildest first; fp16 sends what bf16 sends
_AT_ONCE = 3.0  # times a step's compute that the wire takes, beyond which nothing else need be known
_NEAR_BEST = 1.10  # a milder method may take this much longer than the fastest
_HIDDEN = 0.05  # part of a step that may be exposed where communication counts as hidden
_MILDER = 1.05  # to change to a milder method, it may take this much longer than the one in force
_HARSHER = 1.20  # to change to a harsher one, the one in force must take this much longer


@dataclass(frozen=True)
class AutoPolicy:
    """How ``compression="auto"`` chooses.

    It measures a few dense steps, the links and the codecs, predicts every method's step, and takes the mildest method
    that hides the communication: none, bf16, int8, int4. It checks the gain and the error of what it took, and looks
    again when the bandwidth moves.

    Args:
        allow: Methods of loss-safety class C that it may take too: some of ``"onebit"``, ``"topk"``, ``"powersgd"``.
            The error budget does not hold for them.
        harshest: The harshest of ``"none"``, ``"bf16"``, ``"int8"``, ``"int4"`` that it may take.
        error_budget: Largest ``||decoded - input|| / ||input||`` of a bucket in one round. Beyond it a milder method is
            taken. int4 has 0.12 to 0.17, int8 about 0.007.
        min_gain: Part of a dense step that a method must save.
        measure_steps: Steps to measure before the choice, after a first one.
        check_every: Exchanges between two checks of error, gain and bandwidth.
        cosine_every: Exchanges between two comparisons of the compressed mean of one bucket with its dense mean; 0:
            never.

    """

    allow: Sequence[str] = ()
    harshest: str = "int4"
    error_budget: float = 0.2
    min_gain: float = 0.1
    measure_steps: int = 3
    check_every: int = 50
    cosine_every: int = 200

    def __post_init__(self) -> None:
        coarse = [word for word, method in METHODS.items() if method.loss_safety == "C"]
        if isinstance(self.allow, str) or any(word not in coarse for word in self.allow):
            raise ValueError(f"`allow={self.allow!r}` must be a list of some of {', '.join(map(repr, coarse))}.")
        object.__setattr__(self, "allow", tuple(self.allow))
        if self.harshest not in ("none", *_SAFE):
            words = ", ".join(map(repr, ("none", *_SAFE)))
            raise ValueError(f"`harshest={self.harshest!r}` must be one of {words}; `allow` is for harsher methods.")
        for option, low, high in (("error_budget", 0, 1), ("min_gain", 0, 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
                raise ValueError(f"`{option}={value!r}` must be between {low} and {high}.")
        for option, least in (("measure_steps", 1), ("check_every", 5), ("cosine_every", 0)):
            value = getattr(self, option)
            if type(value) is not int or value < least:
                raise ValueError(f"`{option}={value!r}` must be an int >= {least}.")

    @property
    def methods(self) -> tuple[str, ...]:
        """Words of the methods that may be taken, mildest first, ``"none"`` left out."""
        safe = _SAFE[: _SAFE.index(self.harshest) + 1] if self.harshest != "none" else ()
        return (*safe, *(word for word in METHODS if word in self.allow))

    def within_budget(self, method: str, error: float) -> bool:
        """Whether an error is one that the user accepted."""
        return method in self.allow or error <= self.error_budget


@dataclass(frozen=True)
class Evidence:
    """What is known when a choice is made; the same on all ranks.

    Args:
        profile: A step without exchange.
        link: The network.
        numels: Elements of each parameter, in the module's order.
        bucket_mbs: Sizes of buckets to choose from, MB.
        own_bucket_mb: Size under DDP's own reducer.
        codecs: Cost of each method.
        exact_fraction: Part of the elements that travels exactly.
        too_large: Methods whose state does not fit into memory.

    """

    profile: ComputeProfile
    link: Link
    numels: Sequence[int]
    bucket_mbs: Sequence[float]
    own_bucket_mb: float
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    exact_fraction: float = 0.0
    too_large: frozenset[str] = frozenset()

    @property
    def dense(self) -> Prediction:
        """A step under DDP's own reducer."""
        return self.of(Choice())

    def of(self, choice: Choice) -> Prediction:
        """Predict a step."""
        numels = bucket_numels(self.numels, choice.bucket_mb or self.own_bucket_mb)
        codec = self.codecs.get(choice.method, CodecCost())
        exact = 0.0 if choice.method == "none" else self.exact_fraction
        return predict(self.profile, self.link, Plan(method_named(choice.method), numels, codec, exact))


@dataclass(frozen=True)
class AutoState:
    """What the policy remembers.

    Args:
        choice: In force.
        decisions: All so far.
        beyond_budget: Methods whose error was beyond the budget.
        lost: Methods that won nothing on the present link.

    """

    choice: Choice = Choice()
    decisions: tuple[Decision, ...] = ()
    beyond_budget: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()

    def with_decision(self, decision: Decision) -> "AutoState":
        """Return the state after a decision."""
        return replace(self, choice=decision.choice, decisions=(*self.decisions, decision))

    # ---- transitions --------------------------------------------------------------------------------------------

    def begun(self, policy: AutoPolicy, evidence: Evidence, step: int) -> "AutoState":
        """After the first step: begin with int8 where the wire alone takes far longer than computing."""
        dense, compute_ms = evidence.dense, evidence.profile.step_ms
        allowed = "int8" in policy.methods and "int8" not in evidence.too_large
        if not allowed or dense.transfer_ms <= _AT_ONCE * compute_ms:
            return self
        choice = Choice("int8", min(evidence.bucket_mbs))
        reason = (
            f"the wire takes {dense.transfer_ms:.0f} ms a step, over {_AT_ONCE:.0f} times the {compute_ms:.0f} ms of "
            f"computing, on {_rate(evidence.link)}; int8 at once, while measuring"
        )
        return self.with_decision(Decision(step, choice, reason, evidence.of(choice).step_ms, dense.step_ms))

    def chosen(self, policy: AutoPolicy, evidence: Evidence, step: int, *, why: str = "") -> "AutoState":
        """Choose on the evidence, with hysteresis towards what is in force.

        Args:
            policy: What the user wants.
            evidence: What was measured.
            step: Exchanges done.
            why: What gave occasion, such as a bandwidth that moved.

        """
        dense = evidence.dense
        considered = dict(self._considered(policy, evidence, dense))
        choice = self._mildest(policy, evidence, dense, considered)
        predicted = considered[choice.method][1]
        table = tuple((word, option.bucket_mb, told.step_ms) for word, (option, told) in considered.items())
        reason = f"{why}; " if why else ""
        exposed = dense.exposed_ms / dense.step_ms
        reason += f"communication is {exposed:.0%} of a dense step on {_rate(evidence.link)}; "
        if choice.method == "none":
            reason += self._why_none(policy, evidence, dense, considered)
        else:
            reason += (
                f"{choice.method} predicted {dense.step_ms / predicted.step_ms:.1f}x; "
                f"loss-safe class {METHODS[choice.method].loss_safety}"
            )
        return self.with_decision(Decision(step, choice, reason, predicted.step_ms, dense.step_ms, table))

    def gain_measured(self, policy: AutoPolicy, dense_ms: float | None, step_ms: float, step: int) -> "AutoState":
        """Take a choice back that does not save at least half of what is worth it.

        Args:
            policy: What the user wants.
            dense_ms: A step under DDP's own reducer, measured; None where none was.
            step_ms: A step under the choice, measured.
            step: Exchanges done.

        """
        method = self.choice.method
        if method == "none" or dense_ms is None or step_ms < (1 - policy.min_gain / 2) * dense_ms:
            return self
        reason = f"{method} took {step_ms:.0f} ms a step where dense took {dense_ms:.0f} ms: taken back"
        taken_back = replace(self, lost=self.lost | {method})
        return taken_back.with_decision(Decision(step, Choice(), reason, dense_ms, dense_ms))

    def error_measured(self, policy: AutoPolicy, error: float | None, cosine: float | None, step: int) -> "AutoState":
        """Step back to a milder method where the error is beyond the budget.

        With a relative error ``e`` a round, error feedback adds the last round's to this one's: of uncorrelated errors
        the mean has a cosine of ``1 / sqrt(1 + 2 e^2)`` to the dense one. It may be half as far again.

        Args:
            policy: What the user wants.
            error: ``||decoded - input|| / ||input||`` of the worst bucket on the worst rank.
            cosine: Between compressed and dense mean of one bucket.
            step: Exchanges done.

        """
        method = self.choice.method
        lowest = (1 + 2 * (1.5 * policy.error_budget) ** 2) ** -0.5
        if method == "none" or method in policy.allow:
            return self
        if error is not None and not policy.within_budget(method, error):
            words = f"the error of {method} is {error:.2f}, beyond the budget of {policy.error_budget:.2f}"
        elif cosine is not None and cosine < lowest:
            words = f"the mean under {method} has a cosine of {cosine:.3f} to the dense mean, below {lowest:.3f}"
        else:
            return self
        harsher = policy.methods[policy.methods.index(method) :]
        barred = replace(self, beyond_budget=self.beyond_budget | set(harsher) - set(policy.allow))
        choice, predicted, dense_ms = barred._next_milder(policy)
        reason = f"{words}: back to {choice.method}"
        return barred.with_decision(Decision(step, choice, reason, predicted, dense_ms))

    def link_moved(self) -> "AutoState":
        """Forget what was lost on the link as it was."""
        return replace(self, lost=frozenset())

    # ---- how a choice is made -------------------------------------------------------------------------------------

    def _considered(
        self, policy: AutoPolicy, evidence: Evidence, dense: Prediction
    ) -> Iterator[tuple[str, tuple[Choice, Prediction]]]:
        """Yield each method with the size of buckets that suits it best."""
        yield "none", (Choice(), dense)
        barred = self.beyond_budget | self.lost | evidence.too_large
        for word in policy.methods:
            if word in barred:
                continue
            fixed = self.choice.bucket_mb  # buckets change once at most
            sizes = evidence.bucket_mbs if fixed is None else (fixed,)
            options = [Choice(word, size) for size in sizes]
            told = [(option, evidence.of(option)) for option in options]
            yield word, min(told, key=lambda pair: pair[1].step_ms)

    def _mildest(
        self,
        policy: AutoPolicy,
        evidence: Evidence,
        dense: Prediction,
        considered: Mapping[str, tuple[Choice, Prediction]],
    ) -> Choice:
        best = min(told.step_ms for _, told in considered.values())
        little_sent = dense.transfer_ms < policy.min_gain * dense.step_ms  # latency alone is no reason for a method
        if little_sent or best > (1 - policy.min_gain) * dense.step_ms:
            chosen = Choice()
        else:
            chosen = next(  # mildest first
                option
                for option, told in considered.values()
                if told.exposed_ms <= _HIDDEN * told.step_ms or told.step_ms <= _NEAR_BEST * best
            )
        return self._with_hysteresis(policy, chosen, considered)

    def _with_hysteresis(
        self, policy: AutoPolicy, chosen: Choice, considered: Mapping[str, tuple[Choice, Prediction]]
    ) -> Choice:
        """Keep what is in force unless the change is worth it."""
        current = self.choice.method
        is_first = not any(decision.predictions for decision in self.decisions)
        if is_first or current not in considered or chosen.method == current:
            return chosen
        order = ("none", *policy.methods)
        now_ms, then_ms = considered[current][1].step_ms, considered[chosen.method][1].step_ms
        harsher = order.index(chosen.method) > order.index(current)
        worth_it = now_ms > _HARSHER * then_ms if harsher else then_ms <= _MILDER * now_ms
        return chosen if worth_it else considered[current][0]

    def _why_none(
        self,
        policy: AutoPolicy,
        evidence: Evidence,
        dense: Prediction,
        considered: Mapping[str, tuple[Choice, Prediction]],
    ) -> str:
        others = {word: told.step_ms for word, (_, told) in considered.items() if word != "none"}
        if not policy.methods or not others or dense.transfer_ms < policy.min_gain * dense.step_ms:
            return "nothing to win: DDP's own reducer"
        best = min(others, key=lambda word: others[word])
        return f"the best, {best}, predicted {dense.step_ms / others[best]:.2f}x: not worth it, DDP's own reducer"

    def _next_milder(self, policy: AutoPolicy) -> tuple[Choice, float, float]:
        """Return the harshest method that is still allowed and milder, if it was predicted to win anything."""
        table = next((d for d in reversed(self.decisions) if d.predictions), None)
        if table is None:
            milder = [word for word in policy.methods if word not in self.beyond_budget | set(policy.allow)]
            return (Choice(milder[-1], self.choice.bucket_mb) if milder else Choice()), 0.0, 0.0
        worth = [
            (Choice(word, bucket_mb), ms, table.dense_ms)
            for word, bucket_mb, ms in table.predictions
            if word in policy.methods
            and word not in self.beyond_budget | self.lost | set(policy.allow)
            and ms <= (1 - policy.min_gain) * table.dense_ms
        ]
        return worth[-1] if worth else (Choice(), table.dense_ms, table.dense_ms)


def _rate(link: Link) -> str:
    """Return the rate of the slowest link in words."""
    channel = (
        link.route if link.ranks_per_node > 1 else min(link.route, link.reducer, key=lambda c: -c.bytes_per_second)
    )
    bits = channel.bytes_per_second * 8
    where = "nodes" if link.ranks_per_node > 1 else "ranks"
    number = f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
    return f"{number} between {where}"
