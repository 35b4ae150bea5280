"""Reduce-scatter of encoded gradients inside a node, with error feedback."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compression import Compression, Parameter, Scratch, kernels
from lightning_commopt.compression.pending import Parts
from lightning_commopt.measure import Recorder, Traffic, clock_for
from lightning_commopt.routes import Parcel, Transport
from lightning_commopt.routes.bucket import BucketState, Share
from lightning_commopt.routes.message import NONFINITE, PRESENT
from lightning_commopt.routes.packing import gather
from lightning_commopt.routes.scatter import Rows, Scatter, ScatterLayout
from lightning_commopt.sharded.parameters import ShardedParameter, ShardGroup

__all__ = ["ScatterCodec", "EncodedScatter"]


class ScatterCodec:
    """Encodes gradients before the ranks of a node reduce them, each its own shard.

    Every rank keeps what it dropped of its gradients of *all* shards: with error feedback that is fp32 memory for the
    whole model on every rank. Each backward is a round, those of a window that accumulates too; residuals become final
    when the optimizer step is applied.

    Args:
        method: The codec.
        transport: Between the ranks of a node.
        device: Where gradients are.
        shadow: Whether a step may be skipped.

    """

    def __init__(self, method: Compression, transport: Transport, device: torch.device, shadow: bool) -> None:
        self.method = method
        self.device = device
        self.shadow = shadow
        self.promised = Traffic()
        self.scratch = Scratch(device)
        self.route = Scatter(transport, self.scratch, Recorder(clock_for(device)))
        kernels.prepare(method, device)
        self._kept: dict[tuple[str, ...], BucketState] = {}
        self._loaded: Parts = {}
        self._scale: Callable[[], Tensor | None] = lambda: None
        self._round = 0

    # ---- a round --------------------------------------------------------------------------------------------------

    def begin_round(
        self, round: int, scale: Callable[[], Tensor | None], thrown_away: Callable[[str], bool | Tensor]
    ) -> None:
        """Prepare for a backward.

        Args:
            round: Its number, as after a resume.
            scale: Tells the factor that its gradients carry, once it has begun.
            thrown_away: Whether a parameter's gradient was set to None or to zero since the last round.

        """
        self._round, self._scale = round, scale
        self.discard(thrown_away)

    def discard(self, thrown_away: Callable[[str], bool | Tensor]) -> None:
        """See :meth:`PendingBuffer.discard`; by the name of a whole parameter."""
        for kept in self._kept.values():
            kept.discard(lambda name, kept=kept: thrown_away(_origins(kept)[name][0]))  # type: ignore[misc]

    def scatter(self, parameters: Sequence[ShardedParameter], flat: Tensor, out: Tensor) -> None:
        """Write the mean of this rank's shards.

        Args:
            parameters: Whose gradients there are, in FSDP2's order.
            flat: Shape ``(W n,)``: a row for each rank.
            out: Shape ``(n,)``.

        """
        world, rank = self.route.transport.world, self.route.transport.rank
        kept, scale = self._bucket(parameters, flat.dtype), self._scale()
        layout = _layout(kept)
        if flat.numel() != layout.numel:
            raise RuntimeError(
                f"FSDP2 reduces {flat.numel()} elements of the group with `{parameters[0].name}`, which has "
                f"{layout.numel}: a parameter got no gradient. Freeze it with `requires_grad_(False)`, or use a torch "
                "with `set_reduce_scatter_unused_params`."
            )
        flags = [PRESENT] * len(layout.segments)
        values, exact, _ = gather(kept, flat, flags, scale, self.scratch, kept.first)
        wide = torch.promote_types(kept.dtype, torch.float32)
        parcel = Parcel(
            layout=layout,
            start=0,
            method=self.method,
            dtype=kept.dtype,
            values=values,
            exact=exact,
            flags=kept.flags,
            second=None,
            mean=self.scratch.get("mean", (len(values) // world,), torch.float32),
            exact_mean=self.scratch.get("exact_mean", (len(exact) // world,), wide),
            flags_any=kept.flags_any,
            state={},
            lane=0,
        )
        self.promised += Traffic(inside_node=self.route.traffic(parcel, self._round).total)
        for _ in self.route.exchange(parcel, self._round):
            pass
        _fill(layout, rank, parcel, scale, out)

    def finish_round(self) -> None:
        """Keep residuals of parameters that were finite."""
        for kept in self._kept.values():
            kept.round_done()

    def commit(self, applied: bool | Tensor, names: frozenset[str] | None) -> None:
        """See :meth:`GradientPath.step_done`."""
        for kept in self._kept.values():
            mine = None if names is None else frozenset(part for part, (n, _) in _origins(kept).items() if n in names)
            kept.commit(applied, mine)

    def clear_nonfinite(self) -> None:
        """Zero residuals that the last round spoiled, where there is no shadow to protect them."""
        for kept in self._kept.values():
            kept.clear_nonfinite()

    def _bucket(self, parameters: Sequence[ShardedParameter], dtype: torch.dtype) -> BucketState:
        key = tuple(p.name for p in parameters)
        if key not in self._kept:
            rows = [
                Rows(Parameter(p.name, tuple(p.whole_shape), p.travels_exactly(self.method)), p.numel())
                for p in parameters
            ]
            layout = ScatterLayout(rows, self.method.alignment, self.route.transport.world)
            share = Share(1, 0, 1, 0)
            kept = BucketState([], self.method, share, dtype, self.device, self.shadow, layout=layout)
            self._kept[key] = kept
            _take(kept, self._loaded)
        return self._kept[key]

    # ---- state ----------------------------------------------------------------------------------------------------

    def state(self) -> Parts:
        """Return this rank's residuals by the elements of whole parameters."""
        state = dict(self._loaded)
        for kept in self._kept.values():
            found: Parts = {}
            for part, pieces in ({} if kept.first is None else kept.first.parts()).items():
                name, start = _origins(kept)[part]
                found.setdefault(name, []).extend((start + first, values) for first, values in pieces)
            state |= found
        return state

    def load_state(self, state: Parts) -> None:
        """Take residuals as :meth:`state` gave them, from whatever number of shards."""
        self._loaded = dict(state)
        for kept in self._kept.values():
            _take(kept, self._loaded)

    def follow(self) -> None:
        """Go on with other trainable parameters; what was exchanged and waits for a step counts as applied."""
        self.commit(True, None)
        self._loaded = self.state()
        self._kept = {}

    @property
    def nbytes(self) -> int:
        """Bytes of residuals and working memory."""
        return self.scratch.nbytes + sum(kept.nbytes for kept in self._kept.values())


def _take(kept: BucketState, loaded: Parts) -> None:
    """Move a bucket's part out of loaded residuals."""
    if kept.first is None:
        return
    parts = {
        part: [(first - start, values) for first, values in loaded.get(name, ())]
        for part, (name, start) in _origins(kept).items()
    }
    kept.first.load(parts)
    for name, _ in _origins(kept).values():
        loaded.pop(name, None)


def _layout(kept: BucketState) -> ScatterLayout:
    assert isinstance(kept.layout, ScatterLayout)
    return kept.layout


def _origins(kept: BucketState) -> dict[str, tuple[str, int]]:
    return _layout(kept).origins


def _fill(layout: ScatterLayout, rank: int, parcel: Parcel, scale: Tensor | None, out: Tensor) -> None:
    """Write the own row, zeros where shards are padded; a part that was not finite on some rank becomes NaN."""
    out.zero_()
    for segment in layout.row(rank):
        exact = segment.parameter.exact
        source = parcel.exact_mean if exact else parcel.mean
        start = segment.packed_offset - rank * (layout.exact_chunk if exact else layout.chunk)
        at, numel = segment.bucket_offset - rank * layout.row_numel, segment.parameter.numel
        factor = torch.where((parcel.flags_any[segment.index] & NONFINITE) != 0, torch.nan, 1.0)
        if scale is not None and not exact:
            factor = factor * scale
        torch.mul(source[start : start + numel], factor, out=out[at : at + numel])


class EncodedScatter:
    """What FSDP2 calls in place of a reduce-scatter, for one of its groups.

    Args:
        codec: Shared by all groups.
        inner: FSDP2's own, which allocates.
        group: FSDP2's group of parameters.

    """

    def __init__(self, codec: ScatterCodec, inner: Any, group: ShardGroup) -> None:
        self._codec, self._inner, self._group = codec, inner, group

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return memory as FSDP2's own would."""
        memory: Tensor = self._inner.allocate(*args, **kwargs)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce at once; work that follows on the same stream waits by itself."""
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"`shard_scatter` takes means, and FSDP2 asks for {op}: leave `set_gradient_divide_factor` out."
            )
        self._codec.scatter(self._group.trainable, input_tensor, output_tensor)
