"""Measures, asks the policy, and says when to change: the part of ``auto`` that knows ranks but no Lightning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_commopt.compression import method_named
from lightning_commopt.measure import CommStats, clock_for
from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning.codec_probe import probe_codec, probe_contention
from lightning_commopt.tuning.cost_model import ComputeProfile
from lightning_commopt.tuning.decision import Choice, Decision
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.link_probe import probe_link
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.plan import CodecCost
from lightning_commopt.tuning.policy import AutoPolicy
from lightning_commopt.tuning.state import AutoState
from lightning_commopt.tuning.step_profile import StepProfile, StepTimes, merged_profile

__all__ = ["Observed", "Tuner", "Ways"]

_BUCKET_MBS = (1.0, 2.0, 4.0, 8.0, 25.0)
_OWN_BUCKET_MB = 25.0  # DDP's default
_SETTLE = 2  # steps after a change that are not measured: they allocate
_VERIFY = 8  # steps over which the gain is measured
_MOVED = 0.2
_CALIBRATION = (0.1, 2.0)  # how far the dense steps may correct the probe


@dataclass(frozen=True)
class Ways:
    """The groups in which ranks exchange gradients.

    Args:
        reducer: That of DDP's own reducer.
        route: Of encoded gradients.
        inside: Ranks of this node, where the exchange is hierarchical.

    """

    reducer: dist.ProcessGroup
    route: dist.ProcessGroup
    inside: dist.ProcessGroup | None = None


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
        self.link: Link | None = None
        self.replayed: tuple[Decision, ...] = ()
        """Decisions to come that are taken as they are, without measuring."""
        self._control, self._ways, self._device = control, ways, device
        self._parameters = parameters
        self._observe = observe
        self._bucket_mb = bucket_mb
        self._free_bytes = free_bytes
        self._profile = StepProfile(clock_for(device))
        self._compute: ComputeProfile | None = None
        self._codecs: dict[str, CodecCost] = {}
        self._contention = 1.0
        self._calibration = 1.0  # exposed time of the dense steps, measured over predicted
        self._steps: list[StepTimes] = []  # dense ones, of this rank
        self._dense_ms: float | None = None
        self._phase = "measure"  # then "verify", then "watch"
        self._since = 0  # round at which the phase began
        self._pause = policy.check_every
        self.verified_ms: float | None = None
        """A step under the choice in force, once measured."""
        self.verified_now = False
        """Whether it was measured before this step."""
        self._before: CommStats | None = None
        self._ns_per_byte: float | None = None

    # ---- called in the course of training -------------------------------------------------------------------------

    def start(self) -> None:
        """Measure the links, before the first step. A collective."""
        if not self.replayed and self._phase == "measure":
            self.link = self._probed_link()
            self._profile.watch(self._parameters)

    def follow(self, parameters: Mapping[str, Parameter]) -> None:
        """Go on with other trainable parameters."""
        self._parameters = parameters
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
        self._before = None

    def _changed(self) -> None:
        """Begin to measure what came into force."""
        self.verified_ms, self.verified_now, self._ns_per_byte = None, False, None
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
        assert self.link is not None
        first = self.rounds == 1
        settled = [steps[self._unsettled :] or steps for steps in everyone]
        profile = merged_profile(settled, self._contention)
        if self._compute is not None and profile.backward_ms > self._compute.backward_ms:
            profile = replace(profile, backward_ms=self._compute.backward_ms, ready=self._compute.ready)
        self._compute = profile
        if self.state.choice.method == "none":
            self._dense_ms = _slowest(settled)
        if first:
            return self.state.begun(self.policy, self._evidence(), self.rounds)
        self._profile.unwatch()
        if self.state.choice.method == "none":
            self._calibrate(settled)
        elif self._dense_ms is not None:
            self._dense_ms = min(self._dense_ms, self._evidence().dense.step_ms)  # the only one measured was the first
        if self._may_win():
            self._probe_codecs()
        chosen = self.state.chosen(self.policy, self._evidence(), self.rounds)
        self._enter("verify" if chosen.choice.method != "none" else "watch")
        return chosen

    def _calibrate(self, everyone: Sequence[Sequence[StepTimes]]) -> None:
        """Correct the probe of the links by what the dense steps exposed, on the rank that waited least."""
        exposed_ms = min(median(step.backward_ms - step.compute_ms for step in steps) for steps in everyone)
        predicted_ms = self._evidence().dense.exposed_ms
        if exposed_ms > 0 and predicted_ms > 0:
            low, high = _CALIBRATION
            self._calibration = min(high, max(low, exposed_ms / predicted_ms))

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
        moved = self._moved()
        if moved is None:
            return self.state
        before = self.link
        self.link = self._probed_link()
        if before is not None and self.link is not None and abs(_ratio(self.link, before) - 1) < _MOVED:
            self._pause = min(2 * self._pause, 20 * self.policy.check_every)
            return self.state
        self._pause = self.policy.check_every
        if self._compute is None:
            return self.state
        if self._may_win():
            self._probe_codecs()
        return self.state.link_moved().chosen(self.policy, self._evidence(), self.rounds, why="the bandwidth moved")

    def _within_budget(self, state: AutoState) -> AutoState:
        """Check error and cosine of the method in force. A collective."""
        if state.choice.method == "none":
            return state
        seen = self._observe()
        everyone = self._control.all_gather((seen.stats.compression_error, seen.cosine))
        errors = [error for error, _ in everyone if error is not None]
        cosines = [cosine for _, cosine in everyone if cosine is not None and cosine == cosine]
        return state.error_measured(self.policy, max(errors, default=None), min(cosines, default=None), self.rounds)

    def _moved(self) -> float | None:
        """Return by what the transfer time of a byte changed since the last choice, where that is a fifth or more."""
        stats = self._observe().stats
        window = stats if self._before is None else stats - self._before
        first, self._before = self._before is None, stats
        transfer_ms = window.transfer_ms
        mine = transfer_ms / window.sent_bytes * 1e6 if transfer_ms and window.sent_bytes else 0.0
        now = max(self._control.all_gather(mine))
        if first or not now:
            return None
        if self._ns_per_byte is None:
            self._ns_per_byte = now
            return None
        ratio = now / self._ns_per_byte
        if abs(ratio - 1) < _MOVED:
            return None
        self._ns_per_byte = None
        return ratio

    # ---- measuring ------------------------------------------------------------------------------------------------

    def _probed_link(self) -> Link:
        ways = self._ways
        return probe_link(self._control, self._device, ways.reducer, ways.route, ways.inside)

    def _may_win(self) -> bool:
        """Whether there is enough on the wire that codecs need be measured."""
        dense = self._evidence().dense
        return bool(self.policy.methods) and dense.transfer_ms >= self.policy.min_gain * dense.step_ms

    def _probe_codecs(self) -> None:
        """Measure codecs and contention. A collective."""
        contention = probe_contention(self._device)
        mine = {word: probe_codec(method_named(word), self._device) for word in ("none", *self.policy.methods)}
        everyone = self._control.all_gather((contention, mine))
        self._contention = max(contention for contention, _ in everyone)
        self._codecs = {word: _costliest([codecs[word] for _, codecs in everyone]) for word in mine}
        assert self._compute is not None
        self._compute = replace(self._compute, contention=self._contention)

    def _evidence(self) -> Evidence:
        assert self._compute is not None
        assert self.link is not None
        numels = [p.numel() for p in self._parameters.values()]
        exact = sum(p.numel() for p in self._parameters.values() if method_named("int8").travels_exactly(p.shape))
        fixed = self._bucket_mb
        return Evidence(
            profile=self._compute,
            link=self.link.slower(self._calibration),
            numels=numels,
            bucket_mbs=_BUCKET_MBS if fixed is None else (fixed,),
            own_bucket_mb=_OWN_BUCKET_MB if fixed is None else fixed,
            codecs=self._codecs,
            exact_fraction=exact / max(1, sum(numels)),
            too_large=self._too_large(sum(numels) - exact),
            overlapped=self._device.type == "cpu",
        )

    def _too_large(self, compressed: int) -> frozenset[str]:
        """Return the methods whose state does not fit on some rank. A collective."""
        free = self._control.all_gather(self._free_bytes())
        least = min((nbytes for nbytes in free if nbytes is not None), default=None)
        if least is None:
            return frozenset()
        needed = {word: 2 * method_named(word).memory_bytes(compressed) for word in self.policy.methods}
        return frozenset(word for word, nbytes in needed.items() if nbytes > least)

    # ---- saved and told -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far, and what they rest on, as plain values."""
        return {
            "rounds": self.rounds,
            "decisions": [decision.to_dict() for decision in self.state.decisions],
            "beyond_budget": sorted(self.state.beyond_budget),
            "lost": sorted(self.state.lost),
            "phase": self._phase,
            "since": self._since,
            "pause": self._pause,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where a run stopped: with its choice, and without measuring again what it had measured."""
        self.rounds = saved["rounds"]
        decisions = tuple(Decision.from_dict(values) for values in saved["decisions"])
        past = tuple(decision for decision in decisions if decision.step <= self.rounds)
        self.replayed = decisions[len(past) :]
        choice = past[-1].choice if past else Choice()
        self.state = AutoState(choice, past, frozenset(saved["beyond_budget"]), frozenset(saved["lost"]))
        self._phase, self._since, self._pause = saved["phase"], saved["since"], saved["pause"]
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


def _costliest(costs: Sequence[CodecCost]) -> CodecCost:
    """Return the cost on the rank where a method costs most."""
    return CodecCost(
        max(cost.encode_ns for cost in costs),
        max(cost.decode_ns for cost in costs),
        max(cost.handling_ns for cost in costs),
        max(cost.bucket_us for cost in costs),
    )
