"""The state machine of ``auto``: pure. The same inputs give the same decisions."""

from dataclasses import dataclass, replace

from lightning_commopt.tuning.choosing import InForce, choose, considered, rate_in_words, why_chosen
from lightning_commopt.tuning.decision import Choice, Decision
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.policy import AutoPolicy

__all__ = ["AutoState"]

_FAR_OFF = 1.25  # times the predicted step
_AT_ONCE = 3.0  # times a step's compute that the wire takes, beyond which nothing else need be known


@dataclass(frozen=True)
class AutoState:
    """What the policy remembers.

    Args:
        choice: In force.
        decisions: All so far.
        beyond_budget: Methods whose error was beyond the budget.
        lost: Methods that won nothing on the present link.
        compresses_all: Whether no bucket may stay dense, since a step with such buckets took far longer than predicted.

    """

    choice: Choice = Choice()
    decisions: tuple[Decision, ...] = ()
    beyond_budget: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    compresses_all: bool = False

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
            f"computing, on {rate_in_words(evidence.link)}; int8 at once, while measuring"
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
        options = considered(policy, evidence, self.beyond_budget | self.lost, self.choice.bucket_mb)
        is_chosen = any(decision.predictions for decision in self.decisions)
        choice = choose(policy, evidence, options, InForce(self.choice, is_chosen))
        if self.compresses_all:
            choice = replace(choice, dense_buckets=0)
        predicted = evidence.of(choice)
        table = tuple((word, option.bucket_mb, told.step_ms) for word, (option, told) in options.items())
        reason = f"{why}; " if why else ""
        exposed = dense.exposed_ms / dense.step_ms
        reason += f"communication is {exposed:.0%} of a dense step on {rate_in_words(evidence.link)}; "
        reason += why_chosen(policy, evidence, options, choice)
        return self.with_decision(Decision(step, choice, reason, predicted.step_ms, dense.step_ms, table))

    def gain_measured(self, policy: AutoPolicy, dense_ms: float | None, step_ms: float, step: int) -> "AutoState":
        """Take a choice back that does not save at least half of what is worth it, and dense buckets that cost much.

        Args:
            policy: What the user wants.
            dense_ms: A step under DDP's own reducer, measured; None where none was.
            step_ms: A step under the choice, measured.
            step: Exchanges done.

        """
        method = self.choice.method
        if method == "none":
            return self
        if dense_ms is None or step_ms < (1 - policy.min_gain / 2) * dense_ms:
            return self._dense_buckets_checked(step_ms, step)
        reason = f"{method} took {step_ms:.0f} ms a step where dense took {dense_ms:.0f} ms: taken back"
        taken_back = replace(self, lost=self.lost | {method})
        return taken_back.with_decision(Decision(step, Choice(), reason, dense_ms, dense_ms))

    def _dense_buckets_checked(self, step_ms: float, step: int) -> "AutoState":
        """Compress all buckets where a step with dense ones took far longer than predicted: they are not hidden."""
        last = self.decisions[-1]
        if not self.choice.dense_buckets or not last.predicted_ms or step_ms <= _FAR_OFF * last.predicted_ms:
            return self
        choice = replace(self.choice, dense_buckets=0)
        predicted_ms = next((ms for word, _, ms in last.predictions if word == choice.method), last.predicted_ms)
        reason = f"a step took {step_ms:.0f} ms where {last.predicted_ms:.0f} ms were predicted: no bucket stays dense"
        checked = replace(self, compresses_all=True)
        return checked.with_decision(replace(last, step=step, choice=choice, reason=reason, predicted_ms=predicted_ms))

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
        return replace(self, lost=frozenset(), compresses_all=False)

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
