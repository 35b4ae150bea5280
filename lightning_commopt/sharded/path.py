"""The path of a gradient from FSDP2's reduce-scatter to the mean over replicas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.compression import Compression
from lightning_commopt.compression.pending import Parts
from lightning_commopt.routes import ControlGroup, GradientPath
from lightning_commopt.routes.message import PRESENT
from lightning_commopt.sharded.inside import SCATTER_STATE, InsideNode
from lightning_commopt.sharded.parameters import ShardedParameter, ShardGroup, ShardGroups

__all__ = ["ShardedPath"]

_BY_ELEMENT = ("first", "second")  # state whose places are elements of the parameter


class FlatShard:
    """A group's reduce-scattered gradients, as a bucket that the gradient path takes.

    Args:
        flat: FSDP2's output, shape ``(numel,)``.
        parameters: Whose gradients it holds, in its order.

    """

    def __init__(self, flat: Tensor, parameters: Sequence[ShardedParameter]) -> None:
        self._flat, self._parameters = flat, list(parameters)

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._flat

    def parameters(self) -> list[ShardedParameter]:
        """The parameters in the buffer's order."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether the exchange may not wait for another one: FSDP2 goes on with the result at once."""
        return True


class ShardedPath(GradientPath):
    """Takes what FSDP2 reduced over the shards of a node to its mean over replicas, in place.

    State is kept as this rank has it, and given out by the element of the whole parameter, so that it can be given to
    another number of shards or replicas.

    Args:
        groups: FSDP2's groups of the module.
        method: The compression method.
        replicas: The ranks with this rank's shard, one a node.
        shard: This rank's place among the shards.
        node: The ranks of this rank's node, which have the other shards.
        inside: What travels inside the node.
        **kwargs: As for :class:`GradientPath`.

    """

    def __init__(
        self,
        groups: ShardGroups,
        method: Compression,
        replicas: dist.ProcessGroup,
        shard: int,
        node: dist.ProcessGroup,
        inside: InsideNode,
        **kwargs: Any,
    ) -> None:
        self.shard = shard
        self.inside = inside
        self._node = node
        self._shards = node.size()
        self.groups = groups
        self.deferred = False
        """Whether backward only adds to this rank's gradients, as in all but the last batch of a window."""
        self._deferred_rounds = 0  # of this window
        self._reduced: set[int] = set()  # groups of this round
        self._unused: frozenset[str] = frozenset()  # which no rank used in the last window
        trainable = cast(Mapping[str, Parameter], groups.trainable)
        super().__init__(trainable, method, replicas, track_usage=groups.reduces_unused, **kwargs)
        for group in groups:
            group.managed._all_reduce_hook = partial(self._reduce, group)

    def _reduce(self, group: ShardGroup, flat: Tensor) -> None:
        """FSDP2 hands over a group's shard: replace it by the mean over replicas.

        Raises:
            RuntimeError: A parameter of the group has no gradient, so that nobody knows what lies where.

        """
        if self.deferred:
            return
        trainable = group.trainable
        if not trainable:
            raise RuntimeError(
                f"FSDP2 reduced the group with `{group.parameters[0].name}`, which was frozen inside the step: "
                "freeze it before the step, or by `toggle_optimizer`."
            )
        if flat.numel() != sum(p.numel() for p in trainable):
            raise RuntimeError(
                f"FSDP2 reduced {flat.numel()} elements of the group with `{trainable[0].name}`, which has "
                f"{sum(p.numel() for p in trainable)}: a parameter got no gradient. Freeze it with "
                "`requires_grad_(False)` before the step (with `toggle_optimizer` inside one), or use a torch with "
                "`set_reduce_scatter_unused_params`."
            )
        if id(group) in self._reduced:  # its module ran more than once in the forward
            if self.keeps_residuals:
                raise RuntimeError(
                    f"The module with `{trainable[0].name}` ran more than once in a step, so that its gradient is "
                    "exchanged in parts, and a residual belongs to the whole: leave the module out of `wrap` (what is "
                    "left over is reduced once), call it once on all inputs together, or choose 'none', 'bf16' or "
                    "'fp16'."
                )
            self._handed_over -= len(trainable)
        self._reduced.add(id(group))
        _add_accumulated(flat, trainable)
        begun = self.recorder.clock.mark()
        self.hook(None, cast(GradBucket, FlatShard(flat, trainable))).wait()
        if self.device.type == "cpu":  # backward stood still; on CUDA it went on, and only the last exchange is exposed
            self._last_hook = self.recorder.clock.mark()
            self.recorder.add("exposed", begun, self._last_hook)

    def detach(self) -> None:
        """Take the hooks out of the module."""
        self.inside.detach()
        for group in self.groups:
            group.managed._all_reduce_hook = None

    # ---- rounds and steps -----------------------------------------------------------------------------------------

    def begin_backward(self, deferred: bool, loss_scale: Callable[[], Tensor | None]) -> None:
        """Prepare for a backward.

        Args:
            deferred: Whether replicas do not meet in it.
            loss_scale: Tells the factor that its gradients carry, once it has begun.

        """
        self.deferred = deferred or not self.groups.synchronise
        self._reduced.clear()
        self.follow_trainable()
        if self._usage is not None and not self._deferred_rounds:
            self._usage.note(name for name, p in self.groups.trainable.items() if p.grad is not None)
        number = self.rounds + (self._deferred_rounds << 32)
        self.inside.begin_round(number, loss_scale, self._thrown_away)
        if not self.deferred:
            self.begin_round(loss_scale)

    def finish_backward(self) -> None:
        """Check what a backward left behind."""
        if self.deferred:
            self._deferred_rounds += 1
            self._keep_results()
        else:
            self.finish_round()
            self._deferred_rounds = 0
            self.inside.number_gathers(self.rounds)
        self.inside.finish_round()
        if not self.deferred and self._unused:
            self._leave_out(self._unused)

    @property
    @override
    def _keeps_unused(self) -> bool:
        return False  # FSDP2's buffer is new in every round

    @override
    def _agree_on_use(self) -> None:
        """Count a parameter as used where some rank of the run used it, and find those that none did."""
        self._unused = frozenset()
        if self._usage is None:
            return
        buckets = list(self._buckets.values())
        used = torch.cat([kept.flags_any & PRESENT for kept in buckets])
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._node)
        for kept, flags in zip(buckets, used.split([len(kept.flags_any) for kept in buckets]), strict=True):
            kept.flags_any |= flags
        if all(name in self._usage for name in self.parameters):
            return  # on CUDA, the flags are not waited for
        names = [s.parameter.name for kept in buckets for s in kept.layout.segments]
        self._unused = frozenset(name for name, flag in zip(names, used.tolist(), strict=True) if not flag)

    def _leave_out(self, unused: Collection[str]) -> None:
        """Give parameters that no rank used in a window no gradient, as DDP does, and take their residuals back."""
        for name in unused:
            self.groups.parameters[name].take_grad()
        self.inside.discard(unused)
        if self.keeps_residuals:
            self.keep_shadow()  # the first time, a residual has gone with the gradient

    def somewhere_nonfinite(self, control: ControlGroup) -> bool:
        """Whether some gradient was not finite in the last round, of whichever shard. A collective."""
        count = torch.tensor([len(self.nonfinite_parameters())])
        control.all_reduce(count)
        return bool(count.item())

    def names_of(self, optimizer: Optimizer) -> frozenset[str]:
        """Return the names of an optimizer's parameters."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return frozenset(name for name, p in self.groups.parameters.items() if id(p.tensor) in own)

    @override
    def step_done(self, applied: bool | Tensor, names: frozenset[str] | None = None) -> None:
        if isinstance(applied, Tensor) and self.device.type == "cpu":
            applied = bool(applied.item())
        self.inside.step_done(applied, names)
        super().step_done(applied, names)

    @override
    def clear_nonfinite(self) -> None:
        super().clear_nonfinite()
        self.inside.clear_nonfinite()

    @override
    def resume(self, rounds: int, applied_steps: int) -> None:
        super().resume(rounds, applied_steps)
        self.inside.number_gathers(rounds)

    # ---- state and statistics -------------------------------------------------------------------------------------

    @property
    @override
    def keeps_residuals(self) -> bool:
        return self.method.error_feedback or self.inside.keeps_residuals

    @override
    def expected_memory_bytes(self, largest_bucket: int) -> int:
        return super().expected_memory_bytes(largest_bucket) + self.inside.expected_memory_bytes(self.groups)

    @property
    @override
    def world(self) -> int:
        return self.transport.world * self._shards

    @property
    @override
    def shards(self) -> int:
        return self._shards

    @override
    def whole_numel(self, name: str) -> int:
        return self.parameters[name].numel() * self._shards

    @override
    def _dense_ring_bytes(self, nbytes: int) -> int:
        return self.transport.ring_bytes(nbytes)

    @override
    def _why_not_called(self) -> str:
        return (
            "No module with these parameters took part in the forward of this batch, or `set_all_reduce_hook` replaced "
            "our hook."
        )

    @override
    def state(self) -> dict[str, Parts]:
        return self._replica_state() | self.inside.state()

    def _replica_state(self) -> dict[str, Parts]:
        return {kind: self._moved(kind, parts, 1) for kind, parts in super().state().items()}

    @override
    def load_state(self, state: Mapping[str, Parts]) -> None:
        left = self.inside.load_state(state)
        if not self.method.error_feedback:
            left = {kind: parts for kind, parts in left.items() if kind not in _BY_ELEMENT}
        mine = {kind: self._moved(kind, parts, -1) for kind, parts in left.items()}
        super().load_state({kind: self._cut(parts) if kind in _BY_ELEMENT else parts for kind, parts in mine.items()})

    def _cut(self, parts: Parts) -> Parts:
        """Return what lies in this rank's shards, of parts whose places count from the shard's first element."""
        cut: Parts = {}
        for name, pieces in parts.items():
            numel = self.groups.parameters[name].numel()
            inside = [(max(first, 0), values[max(-first, 0) : max(numel - first, 0)]) for first, values in pieces]
            cut[name] = [(first, values) for first, values in inside if len(values)]
        return cut

    def follow_trainable(self) -> None:
        """Go on with the parameters that are trained now, if they are others."""
        trainable = self.groups.trainable
        if trainable.keys() != self.parameters.keys():
            for parameter in self.groups.parameters.values():
                parameter.flag_to_step()  # FSDP2 does so where it gathers, but not for a group that is not used
            self.follow(cast(Mapping[str, Parameter], trainable))
            self.inside.follow()

    @property
    @override
    def _watched(self) -> dict[str, Tensor]:
        whole = {name: p.gathered for name, p in self.groups.trainable.items()}
        return {name: p for name, p in whole.items() if p is not None and p.requires_grad}

    @override
    def follow(self, parameters: Mapping[str, Parameter]) -> None:
        super().follow(parameters)
        mine = {kind: parts for kind, parts in self._loaded.items() if kind != SCATTER_STATE}
        self._loaded = {kind: self._moved(kind, parts, -1) for kind, parts in mine.items()}

    def _moved(self, kind: str, parts: Parts, sign: int) -> Parts:
        """Return parts with their places counted from the parameter's first element (sign 1), or the shard's (-1)."""
        if kind not in _BY_ELEMENT:
            return dict(parts)
        starts = {name: sign * self.shard * p.numel() for name, p in self.groups.parameters.items()}
        return {
            name: [(first + starts[name], values) for first, values in pieces]
            for name, pieces in parts.items()
            if name in starts
        }


def _add_accumulated(flat: Tensor, parameters: Sequence[ShardedParameter]) -> None:
    """Move gradients of earlier batches of the window, or of earlier backwards, into the buffer."""
    offset = 0
    for parameter in parameters:
        gradient = parameter.take_grad()
        if gradient is not None:
            part = flat[offset : offset + gradient.numel()].view(gradient.shape)
            part.add_(gradient.to(flat.device, non_blocking=True))
        offset += parameter.numel()
