"""Measures, asks the policy, and says when to change: the part of ``auto`` that knows ranks but no Lightning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import Parameter

from lightning_commopt.measure import CommStats, clock_for
from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning.bandwidth import MOVED, BandwidthWatch
from lightning_commopt.tuning.decision import Choice, Decision
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.measurements import Measurements, Ways
from lightning_commopt.tuning.policy import AutoPolicy
from lightning_commopt.tuning.state import AutoState
from lightning_commopt.tuning.step_profile import StepProfile, StepTimes

__all__ = ["Observed", "Tuner"]

_SETTLE = 2  # steps after a change that are not measured: they allocate
_VERIFY = 8  # steps over which the gain is measured


@dataclass(frozen=True)
class Observed:
    """What the exchange in force tells of itself.

    Args:
        stats: Counters so far, waiting told from transfer (:meth:`CommStats.transfer_ms`).
        cosine: Of the last comparison of a compressed mean with the dense one.

    """

    stats: CommStats
    cosine: float | None = None


class Tuner:
    """Call :meth:`before_step` before each step that begins a window, and the two others around each exchange.

    All ranks make the same calls. Rank 0 decides and tells the others.

    Args:
        policy: What the user wants.
        control: Agreement between ranks.
        ways: Groups of gradients.
        device: Where they are.
        parameters: The trainable parameters by name.
        observe: Reads the exchange in force. A collective.
        bucket_mb: DDP's ``bucket_cap_mb`` where the user set it, or where it must not change; None to choose.
        free_bytes: Memory that is free on this rank, None where it is not known.

    """

    def __init__(
        self,
        policy: AutoPolicy,
        control: ControlGroup,
        ways: Ways,
        device: torch.device,
        parameters: Mapping[str, Parameter],
        observe: Callable[[], Observed],
        *,
        bucket_mb: float | None = None,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.state = AutoState()
        self.rounds = 0
        self.replayed: tuple[Decision, ...] = ()
        """Decisions to come that are taken as they are, without measuring."""
        self._control = control
        self._observe = observe
        self.measurements = Measurements(policy, control, ways, device, parameters, bucket_mb, free_bytes)
        self._profile = StepProfile(clock_for(device))
        self._steps: list[StepTimes] = []  # dense ones, of this rank
        self._dense_ms: float | None = None
        self._phase = "measure"  # then "verify", then "watch"
        self._since = 0  # round at which the phase began
        self._looked = 0  # round at which something was chosen last, or found best again
        self._why = ""  # what gave occasion to look again
        self._tells_all = True  # whether it is a decision to go on as before
        self._pause = policy.check_every
        self.verified_ms: float | None = None
        """A step under the choice in force, once measured."""
        self.verified_now = False
        """Whether it was measured before this step."""
        self._bandwidth = BandwidthWatch(control)

    # ---- called in the course of training -------------------------------------------------------------------------

    def start(self) -> None:
        """Measure the links, before the first step. A collective."""
        if not self.replayed and self._phase == "measure":
            self.measurements.probe_link()
            self._profile.watch(self.measurements.parameters)

    def follow(self, parameters: Mapping[str, Parameter]) -> None:
        """Go on with other trainable parameters."""
        self.measurements.parameters = parameters
        if self._phase == "measure" and not self.replayed:
            self._profile.watch(parameters)

    def before_step(self) -> Choice | None:
        """Return what to change to, on all ranks at the same step; None to go on. A collective where one is due."""
        before = self.state.choice
        self.verified_now = False
        if self.replayed:
            self._replay()
        elif self._is_due():
            self._profile.pause()
            self._steps = self._profile.take()
            self.measurements.in_force = self.state.choice.method
            self.state = self._control.broadcast(self._decided())
        self._profile.resume()
        if self.state.choice == before:
            return None
        self._changed()
        return self.state.choice

    def backward_begins(self) -> None:
        """A synchronising backward begins."""
        self._profile.backward_begins()

    def backward_ended(self) -> None:
        """All gradients are exchanged."""
        self._profile.backward_ended()
        self.rounds += 1

    def step_ended(self) -> None:
        """What follows until :meth:`before_step` is no part of a step. Where this is not called, all is."""
        self._profile.pause()

    def close(self) -> None:
        """Let go of the parameters."""
        self._profile.unwatch()

    # ---- when -----------------------------------------------------------------------------------------------------

    @property
    def _elapsed(self) -> int:
        return self.rounds - self._since

    @property
    def _unsettled(self) -> int:
        """Steps of this phase that are not measured: something changed before them."""
        return _SETTLE if self.state.choice.method != "none" else 0

    def _is_due(self) -> bool:
        """Whether there is something to decide; the same on all ranks."""
        if self._phase == "measure":
            begun = self.rounds == 1 and not self.state.decisions
            return begun or self._elapsed >= max(1, self._unsettled) + self.policy.measure_steps
        if self._phase == "verify":
            return self._elapsed >= _SETTLE + _VERIFY
        return self._elapsed >= self._pause

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, self.rounds
        self._bandwidth.begin()

    def _changed(self) -> None:
        """Begin to measure what came into force."""
        self.verified_ms, self.verified_now = None, False
        self._bandwidth.forget()
        self._profile.take()
        if self._phase != "measure":
            self._enter("verify" if self.state.choice.method != "none" else "watch")
        else:
            self._since = self.rounds

    def _replay(self) -> None:
        """Take the decisions of a saved log that are due."""
        for decision in self.replayed:
            if decision.step <= self.rounds:
                self.state = self.state.with_decision(decision)
        self.replayed = tuple(decision for decision in self.replayed if decision.step > self.rounds)
        if not self.replayed:
            self._enter("watch")

    # ---- what -----------------------------------------------------------------------------------------------------

    def _decided(self) -> AutoState:
        """Return the state after what is due. A collective."""
        if self._phase == "measure":
            return self._measured()
        if self._phase == "verify":
            return self._verified()
        return self._watched()

    def _measured(self) -> AutoState:
        everyone = self._control.all_gather(self._steps)
        if any(not steps for steps in everyone):
            return self.state
        measurements, is_dense = self.measurements, self.state.choice.method == "none"
        settled = [steps[self._unsettled :] or steps for steps in everyone]
        measurements.take_profile(settled)
        if is_dense:
            self._dense_ms = _slowest(settled)
        if self.rounds == 1:
            return self.state.begun(self.policy, measurements.evidence(), self.rounds)
        self._profile.unwatch()
        if is_dense:
            measurements.calibrate(settled)
        elif self._dense_ms is not None and not self._looked:  # the only one measured was the first
            self._dense_ms = min(self._dense_ms, measurements.evidence().dense.step_ms)
        return self._chosen(self.state)

    def _chosen(self, state: AutoState) -> AutoState:
        """Choose on what is measured; a look at intervals that changes nothing is no decision. A collective."""
        if self.measurements.may_win():
            self.measurements.probe_codecs()
        chosen = state.chosen(self.policy, self.measurements.evidence(), self.rounds, why=self._why)
        is_same = chosen.choice == state.choice and not self._tells_all
        self._looked = self.rounds
        self._enter("watch" if is_same or chosen.choice.method == "none" else "verify")
        return state if is_same else chosen

    def _verified(self) -> AutoState:
        everyone = self._control.all_gather(self._steps)
        self._enter("watch")
        if any(len(steps) <= _SETTLE for steps in everyone):
            return self.state
        step_ms = _slowest([steps[_SETTLE:] for steps in everyone])
        self.verified_ms, self.verified_now = step_ms, True
        checked = self.state.gain_measured(self.policy, self._dense_ms, step_ms, self.rounds)
        return checked if checked is not self.state else self._within_budget(checked)

    def _watched(self) -> AutoState:
        self._since = self.rounds
        checked = self._within_budget(self.state)
        if checked is not self.state:
            return checked
        moved, looks = self._bandwidth.moved(self._observe().stats), self._is_time_to_look
        if not moved and not looks:
            return self.state
        before, now = self.measurements.link, self.measurements.probe_link()
        moved = moved and (before is None or abs(_ratio(now, before) - 1) >= MOVED)
        if not moved and not looks:
            self._pause = min(2 * self._pause, 20 * self.policy.check_every)
            return self.state
        self._pause = self.policy.check_every
        self._tells_all = moved
        self._why = "the bandwidth moved" if moved else f"looked again after {self.rounds - self._looked} exchanges"
        state = self.state.link_moved() if moved else self.state
        if self.measurements.compute is None or looks:
            self._measure_again()
            return state
        return self._chosen(state)

    @property
    def _is_time_to_look(self) -> bool:
        """Whether a choice was made so long ago that it is to be looked at again."""
        every = self.policy.redecide_every
        return every > 0 and self.rounds - self._looked >= every

    def _measure_again(self) -> None:
        """Take the profile of some steps anew, under what is in force."""
        self.measurements.compute = None
        self._looked = max(self._looked, 1)
        self._profile.watch(self.measurements.parameters)
        self._enter("measure")

    def _within_budget(self, state: AutoState) -> AutoState:
        """Check error and cosine of the method in force. A collective."""
        if state.choice.method == "none":
            return state
        seen = self._observe()
        everyone = self._control.all_gather((seen.stats.compression_error, seen.cosine))
        errors = [error for error, _ in everyone if error is not None]
        cosines = [cosine for _, cosine in everyone if cosine is not None and cosine == cosine]
        return state.error_measured(self.policy, max(errors, default=None), min(cosines, default=None), self.rounds)

    # ---- saved and told -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far, and what they rest on, as plain values."""
        return {
            "rounds": self.rounds,
            "decisions": [decision.to_dict() for decision in self.state.decisions],
            "beyond_budget": sorted(self.state.beyond_budget),
            "lost": sorted(self.state.lost),
            "compresses_all": self.state.compresses_all,
            "phase": self._phase,
            "since": self._since,
            "pause": self._pause,
            "looked": self._looked,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where a run stopped: with its choice, and without measuring again what it had measured."""
        self.rounds = saved["rounds"]
        decisions = tuple(Decision.from_dict(values) for values in saved["decisions"])
        past = tuple(decision for decision in decisions if decision.step <= self.rounds)
        self.replayed = decisions[len(past) :]
        choice = past[-1].choice if past else Choice()
        barred = frozenset(saved["beyond_budget"]), frozenset(saved["lost"])
        self.state = AutoState(choice, past, *barred, saved.get("compresses_all", False))
        self._phase, self._since, self._pause = saved["phase"], saved["since"], saved["pause"]
        self._looked = saved.get("looked", self.rounds)
        if not saved.get("same_world", True):  # what was measured holds no longer; what is in force stays until it is
            self._phase, self._since, self.replayed = "measure", self.rounds, ()

    def words(self) -> str:
        """Return the last decision, and how it turned out."""
        if not self.state.decisions:
            return "measuring"
        last = self.state.decisions[-1]
        text = last.reason
        if self.verified_ms and self._dense_ms and last.choice.method != "none":
            text += f"; measured {self._dense_ms / self.verified_ms:.1f}x"
        return text


def _slowest(everyone: Sequence[Sequence[StepTimes]]) -> float:
    """Return the median duration of a step on the rank where it is longest."""
    return max(median(step.step_ms for step in steps) for steps in everyone)


def _ratio(now: Link, before: Link) -> float:
    return now.route.bytes_per_second / before.route.bytes_per_second
