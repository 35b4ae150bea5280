"""Sums of flat gradient buffers over ranks, encoded on the wire."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compression import Compression, Parameter, Scratch, Uncompressed, kernels
from lightning_commopt.compression.pending import Parts
from lightning_commopt.measure import CommStats, Recorder, Traffic, clock_for
from lightning_commopt.routes import Parcel, Route
from lightning_commopt.routes.bucket import BucketState, Share, parts_of
from lightning_commopt.routes.choose import route_for
from lightning_commopt.routes.message import NONFINITE, PRESENT
from lightning_commopt.routes.packing import gather, unpack
from lightning_commopt.routes.transport import Transport, transport_for
from lightning_commopt.zero.held import Held
from lightning_commopt.zero.scatter import Scatter, ScatterLayout

__all__ = ["ZeroExchange"]

_ERROR_EVERY = 50  # rounds between two samples of the compression error


class ZeroExchange:
    """Sums buffers over ranks: + residual, encode, travel, decode, sum; the residual is kept by parameter.

    A step is never skipped after its gradients were exchanged, so that residuals are final at once.

    Args:
        method: The compression method.
        device: Where gradients are.
        residuals: Whether what a round drops is added to the next one, for methods that can.

    """

    def __init__(self, method: Compression, device: torch.device, *, residuals: bool) -> None:
        self.method = method
        self.device = device
        self.residuals = residuals and method.error_feedback
        if not isinstance(method, Uncompressed):
            kernels.prepare(method, device)
        self.scratch = Scratch(device)
        self.recorder = Recorder(clock_for(device))
        self.rounds = self.hits = self.steps = 0
        self._hits_of_step = self._hits_of_round = 0
        self._transports: dict[dist.ProcessGroup, Transport] = {}
        self._routes: dict[tuple[dist.ProcessGroup, bool], Route] = {}
        self._buffers: dict[tuple[Any, ...], BucketState] = {}
        self._loaded: dict[str, Parts] = {}
        self._errors: list[Tensor] = []
        self._promised = Traffic()
        self._dense_bytes = self._passed_bytes = 0

    # ---- sums -----------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, parameters: Sequence[Parameter], group: dist.ProcessGroup) -> None:
        """Replace a buffer by its sum over ranks.

        Args:
            tensor: Flat gradients, shape ``(n,)``.
            parameters: What it holds, in its order.
            group: The ranks.

        """
        route = self._route(group, scatter=False)
        world = route.transport.world
        key = ("all_reduce", tuple(p.name for p in parameters), tensor.dtype)
        kept = self._buffers.get(key)
        if kept is None:
            share = Share(1, 0, route.owners, route.transport.rank if route.owners > 1 else 0)
            kept = BucketState(parameters, self.method, share, tensor.dtype, self.device, False, self.residuals)
            self._keep(key, kept)
        with self._exposed():
            parcel = self._exchange(route, kept, tensor, 1)
            with self.recorder.span("decode"):
                unpack(kept, parcel.mean, parcel.exact_mean, None, tensor, keep_unused=False)
                tensor.mul_(world)
        self._count(tensor, 2, world)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, held: Sequence[Held], group: dist.ProcessGroup) -> None:
        """Write this rank's row of the sum over ranks.

        Args:
            output: Shape ``(n / W,)``; may be a part of ``tensor``.
            tensor: Flat gradients, shape ``(n,)``, a row for each rank as :class:`ScatterLayout` describes it.
            held: What it holds.
            group: The ranks.

        """
        route = self._route(group, scatter=True)
        world, rank = route.transport.world, route.transport.rank
        key = ("reduce_scatter", tuple(one.name for one in held), tensor.dtype)
        kept = self._buffers.get(key)
        if kept is None:
            layout = ScatterLayout(held, self.method, world)
            kept = BucketState(
                [], self.method, Share(1, 0, 1, 0), tensor.dtype, self.device, False, self.residuals, layout
            )
            self._keep(key, kept)
        assert isinstance(kept.layout, ScatterLayout)
        with self._exposed():
            parcel = self._exchange(route, kept, tensor, world)
            with self.recorder.span("decode"):
                _fill(kept.layout, rank, parcel, output)
                output.mul_(world)
        self._count(tensor, 1, world)

    @contextmanager
    def passing(self, tensor: Tensor, times: int, world: int) -> Iterator[None]:
        """Count and time a buffer that DeepSpeed sums itself.

        Args:
            tensor: The whole buffer.
            times: 2 for an all-reduce, 1 for a reduce-scatter.
            world: Number of ranks.

        """
        begun = self.recorder.clock.mark()
        with self._exposed():
            yield
        self.recorder.arrived(begun, times * (world - 1) * tensor.nbytes // world, awaited=True)
        self._count(tensor, times, world)
        self._passed_bytes += times * (world - 1) * tensor.nbytes // world

    def _exposed(self) -> AbstractContextManager[object]:
        """Time in which backward waits: on the CPU all of an exchange; elsewhere nobody can say."""
        return self.recorder.span("exposed") if self.device.type == "cpu" else nullcontext()

    def _exchange(self, route: Route, kept: BucketState, tensor: Tensor, rows: int) -> Parcel:
        """Carry a buffer to its mean; of ``rows`` rows, only the own one."""
        with self.recorder.span("encode"):
            known = [PRESENT] * len(kept.layout.segments)
            values, exact, flags = gather(kept, tensor, known, None, self.scratch, kept.first)
        wide = torch.promote_types(kept.dtype, torch.float32)
        parcel = Parcel(
            layout=kept.layout,
            start=0,
            method=self.method,
            dtype=kept.dtype,
            values=values,
            exact=exact,
            flags=flags,
            second=kept.second,
            mean=self.scratch.get("mean", (len(values) // rows,), torch.float32),
            exact_mean=self.scratch.get("exact_mean", (len(exact) // rows,), wide),
            flags_any=kept.flags_any,
            state=kept.method_state,
            lane=0,
        )
        self._promised += route.traffic(parcel, self.rounds)
        sampled = self.rounds % _ERROR_EVERY == 0
        before = torch.linalg.vector_norm(values, dtype=torch.float64) if sampled else None
        exchange = route.exchange(parcel, self.rounds)
        next(exchange, None)  # encoded: values are the error now
        if before is not None:
            error = torch.linalg.vector_norm(values, dtype=torch.float64) / before.clamp_min(1e-300)
            self._errors = [error] if self.hits == self._hits_of_round else [*self._errors, error]
        for _ in exchange:
            pass
        return parcel

    def _route(self, group: dist.ProcessGroup, scatter: bool) -> Route:
        if (group, scatter) not in self._routes:
            if group not in self._transports:
                self._transports[group] = transport_for(group, self.device)
            transport = self._transports[group]
            self._routes[group, scatter] = (
                Scatter(transport, self.scratch, self.recorder)
                if scatter
                else route_for(self.method, transport, self.scratch, self.recorder)
            )
        return self._routes[group, scatter]

    def _keep(self, key: tuple[Any, ...], kept: BucketState) -> None:
        kept.take(self._loaded)
        self._buffers[key] = kept

    def _count(self, tensor: Tensor, times: int, world: int) -> None:
        self.hits += 1
        self._dense_bytes += times * (world - 1) * tensor.nbytes // world

    # ---- rounds and steps -----------------------------------------------------------------------------------------

    def finish_round(self) -> None:
        """End a backward, in which DeepSpeed may have accumulated only.

        Raises:
            FloatingPointError: On all ranks alike, if a gradient was not finite and there are residuals to be spoiled.

        """
        if self.hits == self._hits_of_round:
            return
        self._hits_of_round = self.hits
        self.rounds += 1
        if not self.residuals:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # DeepSpeed reduces on a stream of its own
        if names := sorted({name for kept in self._buffers.values() for name in kept.nonfinite_names()}):
            raise FloatingPointError(
                f"The gradient of `{names[0]}`{f' and {len(names) - 1} more' * (len(names) > 1)} is not finite on some "
                f"rank. Method `{self.method.name}` would carry it on in its residual. Find its cause with "
                "`Trainer(detect_anomaly=True)`, or set `residuals=False`."
            )

    def finish_step(self) -> None:
        """End what an optimizer step needed.

        Raises:
            RuntimeError: DeepSpeed has not given us a gradient since the last step.

        """
        if self.hits == self._hits_of_step:
            raise RuntimeError(
                f"No gradient of this step came to method `{self.method.name}`: DeepSpeed reduced them by a way that "
                "is not known here, or something replaced its communication backend. Choose `compression='none'` with "
                "Lightning's `DeepSpeedStrategy`."
            )
        self._hits_of_step = self.hits
        self.steps += 1

    # ---- state and statistics -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Parts]:
        """Return this rank's residuals, as ``"first"`` and ``"second"``, by parameter."""
        return parts_of(self._buffers.values(), self._loaded)

    def load_state(self, state: dict[str, Parts], rounds: int) -> None:
        """Take residuals as :meth:`state` gave them."""
        self.rounds = rounds
        self._loaded = {kind: dict(parts) for kind, parts in state.items()}
        for kept in self._buffers.values():
            kept.take(self._loaded)

    def stats(self, world: int) -> CommStats:
        """Return the sums so far."""
        self.recorder.settle()
        times = self.recorder.totals_ms
        return CommStats(
            method=self.method.name,
            world_size=world,
            rounds=self.rounds,
            hook_calls=self.hits,
            applied_steps=self.steps,
            promised=self._promised + Traffic(payload=self._passed_bytes),
            sent_bytes=sum(t.sent_bytes for t in self._transports.values()) + self._passed_bytes,
            dense_bytes=self._dense_bytes,
            compression_error=max(map(float, self._errors), default=None),
            encode_ms=times["encode"],
            decode_ms=times["decode"],
            collective_ms=times["collective"],
            wait_ms=self.recorder.wait_ms,
            exposed_ms=times["exposed"],
            memory_bytes=self.scratch.nbytes + sum(kept.nbytes for kept in self._buffers.values()),
        )


def _fill(layout: ScatterLayout, rank: int, parcel: Parcel, output: Tensor) -> None:
    """Write the own row; a part that was not finite on some rank becomes NaN."""
    for segment in layout.row(rank):
        source = parcel.exact_mean if segment.parameter.exact else parcel.mean
        start = segment.packed_offset - rank * (layout.exact_chunk if segment.parameter.exact else layout.chunk)
        at = segment.bucket_offset - rank * layout.row_numel
        finite = torch.where((parcel.flags_any[segment.index] & NONFINITE) != 0, torch.nan, 1.0)
        numel = segment.parameter.numel
        torch.mul(source[start : start + numel], finite, out=output[at : at + numel])
