"""What travels inside a node: counted, and encoded where that was asked for."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compression import Compression
from lightning_commopt.compression.pending import Parts
from lightning_commopt.measure import CommStats, Traffic
from lightning_commopt.routes.transport import transport_for
from lightning_commopt.sharded.gather import EncodedGather, GatherCodec
from lightning_commopt.sharded.parameters import ShardedParameter, ShardGroup, ShardGroups
from lightning_commopt.sharded.scatter import EncodedScatter, ScatterCodec

__all__ = ["SCATTER_STATE", "InsideNode"]

SCATTER_STATE = "scatter"
"""Kind of state that residuals of the reduce-scatter are."""

_GATHER, _SCATTER = "_all_gather_comm", "_reduce_scatter_comm"


class InsideNode:
    """Takes the place of FSDP2's all-gathers and reduce-scatters until :meth:`detach`.

    Args:
        groups: FSDP2's groups of the module.
        ranks: Those of the node, which share them.
        device: Where parameters are.
        gather: How parameters are encoded; None: not at all.
        scatter: How gradients are encoded; None: not at all.
        shadow: Whether a step may be skipped.

    """

    def __init__(
        self,
        groups: ShardGroups,
        ranks: dist.ProcessGroup,
        device: torch.device,
        gather: Compression | None = None,
        scatter: Compression | None = None,
        *,
        shadow: bool = True,
    ) -> None:
        self._groups = groups
        self._transport = None if gather is None and scatter is None else transport_for(ranks, device)
        self.gather: GatherCodec | None = None
        self.scatter: ScatterCodec | None = None
        if gather is not None and self._transport is not None:
            self.gather = GatherCodec(gather, self._transport, device)
        if scatter is not None and self._transport is not None:
            self.scatter = ScatterCodec(scatter, self._transport, device, shadow)
        self.counted_bytes = 0
        """What FSDP2's own collectives sent: a ring's share of them."""
        self._theirs: list[tuple[Any, str, Any]] = []
        for group in groups:
            self._replace(group, _GATHER, self._gathering)
            self._replace(group, _SCATTER, self._scattering)

    def _gathering(self, theirs: Any, group: ShardGroup) -> Any:
        return _Counted(self, theirs) if self.gather is None else EncodedGather(self.gather, theirs, group.parameters)

    def _scattering(self, theirs: Any, group: ShardGroup) -> Any:
        return _Counted(self, theirs) if self.scatter is None else EncodedScatter(self.scatter, theirs, group)

    def _replace(self, group: ShardGroup, attribute: str, ours: Callable[[Any, ShardGroup], Any]) -> None:
        """Let FSDP2 call ours, where this torch lets it."""
        theirs = getattr(group.managed, attribute, None)
        if theirs is not None:
            self._theirs.append((group.managed, attribute, theirs))
            setattr(group.managed, attribute, ours(theirs, group))

    def detach(self) -> None:
        """Give FSDP2 its own collectives back."""
        for managed, attribute, theirs in self._theirs:
            setattr(managed, attribute, theirs)
        self._theirs = []

    def begin_round(
        self, round: int, scale: Callable[[], Tensor | None], thrown_away: Callable[[str], bool | Tensor]
    ) -> None:
        """Prepare for a backward; see :meth:`ScatterCodec.begin_round`."""
        if self.scatter is not None:
            self.scatter.begin_round(round, scale, thrown_away)

    def finish_round(self) -> None:
        """See :meth:`ScatterCodec.finish_round`."""
        if self.scatter is not None:
            self.scatter.finish_round()

    def discard(self, names: Collection[str]) -> None:
        """Forget what the last rounds kept of gradients that are thrown away."""
        if self.scatter is not None:
            self.scatter.discard(lambda name: name in names)

    def number_gathers(self, round: int) -> None:
        """Tell how many rounds were before the gathers that follow."""
        if self.gather is not None:
            self.gather.round = round

    def step_done(self, applied: bool | Tensor, names: frozenset[str] | None) -> None:
        """See :meth:`GradientPath.step_done`."""
        if self.scatter is not None:
            self.scatter.commit(applied, names)

    def clear_nonfinite(self) -> None:
        """See :meth:`ScatterCodec.clear_nonfinite`."""
        if self.scatter is not None:
            self.scatter.clear_nonfinite()

    def follow(self) -> None:
        """See :meth:`ScatterCodec.follow`."""
        if self.scatter is not None:
            self.scatter.follow()

    # ---- state and statistics -------------------------------------------------------------------------------------

    @property
    def keeps_residuals(self) -> bool:
        """Whether there is error feedback."""
        return self.scatter is not None and self.scatter.method.error_feedback

    def state(self) -> dict[str, Parts]:
        """Return this rank's residuals, by whole parameters; nothing where there are none."""
        return {SCATTER_STATE: self.scatter.state()} if self.scatter is not None and self.keeps_residuals else {}

    def load_state(self, state: Mapping[str, Parts]) -> dict[str, Parts]:
        """Take residuals, and return the rest of the state.

        Where no codec takes them, they are added to those of the exchange between nodes. That keeps their mean, if
        every rank has the same.
        """
        rest = dict(state)
        parts = rest.pop(SCATTER_STATE, {})
        if self.scatter is not None and self.keeps_residuals:
            self.scatter.load_state(parts)
        elif parts:
            rest["first"] = _sum(rest.get("first", {}), parts)
        return rest

    def expected_memory_bytes(self, groups: ShardGroups) -> int:
        """Return about the bytes that the codecs will take on this rank."""
        total = 0
        if self.gather is not None:
            total += max(_whole(group.parameters) for group in groups)
        if self.scatter is not None:
            state = self.scatter.method.memory_bytes(_whole(groups.parameters.values()))
            total += state * (2 if self.scatter.shadow else 1) + max(2 * _whole(group.parameters) for group in groups)
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the codecs hold."""
        return sum(codec.nbytes for codec in (self.gather, self.scatter) if codec is not None)

    def added_to(self, stats: CommStats) -> CommStats:
        """Return statistics of the exchange between nodes together with what was sent inside this one."""
        promised = Traffic(inside_node=self.counted_bytes)
        for codec in (self.gather, self.scatter):
            promised += Traffic() if codec is None else codec.promised
        sent = self.counted_bytes + (0 if self._transport is None else self._transport.sent_bytes)
        return replace(
            stats,
            promised=stats.promised + promised,
            sent_bytes=stats.sent_bytes + sent,
            memory_bytes=stats.memory_bytes + self.nbytes,
        )


def _whole(parameters: Iterable[ShardedParameter]) -> int:
    return sum(p.whole_shape.numel() for p in parameters)


def _sum(one: Parts, other: Parts) -> Parts:
    """Return the sum of parts; other's cover whole parameters."""
    total = dict(one)
    for name, pieces in other.items():
        length = max(first + len(values) for first, values in (*pieces, *one.get(name, ())))
        whole = torch.zeros(length)
        for first, values in (*pieces, *one.get(name, ())):
            whole[first : first + len(values)] += values
        total[name] = [(0, whole)]
    return total


class _Counted:
    """Counts a collective of FSDP2 and lets it run.

    Args:
        inside: Keeps the count.
        inner: FSDP2's own.

    """

    def __init__(self, inside: InsideNode, inner: Any) -> None:
        self._inside, self._inner = inside, inner

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return memory as FSDP2's own does."""
        memory: Tensor = self._inner.allocate(*args, **kwargs)
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """Gather or scatter."""
        whole = max(output_tensor.nbytes, input_tensor.nbytes)
        self._inside.counted_bytes += whole * (group.size() - 1) // group.size()
        return self._inner(*args, output_tensor=output_tensor, input_tensor=input_tensor, group=group, **kwargs)
