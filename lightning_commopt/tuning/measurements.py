"""What is measured for a choice: links, codecs, a step without exchange, memory; the same on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_commopt.compression import method_named
from lightning_commopt.routes import ControlGroup
from lightning_commopt.tuning.codec_probe import probe_codec, probe_contention
from lightning_commopt.tuning.cost_model import ComputeProfile
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.link_probe import probe_link
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.plan import CodecCost
from lightning_commopt.tuning.policy import AutoPolicy
from lightning_commopt.tuning.step_profile import StepTimes, merged_profile

__all__ = ["Measurements", "Ways"]

_BUCKET_MBS = (1.0, 2.0, 4.0, 8.0, 25.0)
_OWN_BUCKET_MB = 25.0  # DDP's default
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


class Measurements:
    """Measures, with all ranks together, and keeps the last results.

    Args:
        policy: What the user wants.
        control: Agreement between ranks.
        ways: Groups of gradients.
        device: Where they are.
        parameters: The trainable parameters by name.
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
        bucket_mb: float | None,
        free_bytes: Callable[[], int | None],
    ) -> None:
        self.parameters = parameters
        self.link: Link | None = None
        self.compute: ComputeProfile | None = None
        self.in_force = "none"
        """Word of the method whose state takes memory already."""
        self._policy, self._control, self._ways, self._device = policy, control, ways, device
        self._bucket_mb = bucket_mb
        self._free_bytes = free_bytes
        self.codecs: dict[str, CodecCost] = {}
        """Of each method that may be taken, once there was something to win."""
        self._contention = 1.0
        self._calibration = 1.0  # exposed time of the dense steps, measured over predicted

    def probe_link(self) -> Link:
        """Measure the links. A collective."""
        ways = self._ways
        self.link = probe_link(self._control, self._device, ways.reducer, ways.route, ways.inside)
        return self.link

    def take_profile(self, everyone: list[list[StepTimes]]) -> None:
        """Take a step without exchange from what all ranks measured; of several times, the least backward counts."""
        profile = merged_profile(everyone, self._contention)
        if self.compute is not None and profile.backward_ms > self.compute.backward_ms:
            profile = replace(profile, backward_ms=self.compute.backward_ms, ready=self.compute.ready)
        self.compute = profile

    def calibrate(self, everyone: Sequence[Sequence[StepTimes]]) -> None:
        """Correct the probe of the links by what the dense steps exposed, on the rank that waited least."""
        exposed_ms = min(median(step.backward_ms - step.compute_ms for step in steps) for steps in everyone)
        self._calibration = 1.0
        predicted_ms = self.evidence().dense.exposed_ms
        if exposed_ms > 0 and predicted_ms > 0:
            low, high = _CALIBRATION
            self._calibration = min(high, max(low, exposed_ms / predicted_ms))

    def may_win(self) -> bool:
        """Whether there is enough on the wire that codecs need be measured."""
        dense = self.evidence().dense
        return bool(self._policy.methods) and dense.transfer_ms >= self._policy.min_gain * dense.step_ms

    def probe_codecs(self) -> None:
        """Measure codecs and contention. A collective."""
        contention = probe_contention(self._device)
        mine = {word: probe_codec(method_named(word), self._device) for word in ("none", *self._policy.methods)}
        everyone = self._control.all_gather((contention, mine))
        self._contention = max(contention for contention, _ in everyone)
        self.codecs = {word: _costliest([codecs[word] for _, codecs in everyone]) for word in mine}
        assert self.compute is not None
        self.compute = replace(self.compute, contention=self._contention)

    def evidence(self) -> Evidence:
        """Return what a choice rests on. A collective."""
        assert self.compute is not None
        assert self.link is not None
        numels = [p.numel() for p in self.parameters.values()]
        exact = sum(p.numel() for p in self.parameters.values() if method_named("int8").travels_exactly(p.shape))
        fixed = self._bucket_mb
        return Evidence(
            profile=self.compute,
            link=self.link.slower(self._calibration),
            numels=numels,
            bucket_mbs=_BUCKET_MBS if fixed is None else (fixed,),
            own_bucket_mb=_OWN_BUCKET_MB if fixed is None else fixed,
            codecs=self.codecs,
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
        words = {self.in_force, *self._policy.methods}
        needed = {word: 2 * method_named(word).memory_bytes(compressed) for word in words}
        return frozenset(word for word, nbytes in needed.items() if nbytes > least + needed[self.in_force])


def _costliest(costs: Sequence[CodecCost]) -> CodecCost:
    """Return the cost on the rank where a method costs most."""
    return CodecCost(
        max(cost.encode_ns for cost in costs),
        max(cost.decode_ns for cost in costs),
        max(cost.handling_ns for cost in costs),
        max(cost.bucket_us for cost in costs),
    )
