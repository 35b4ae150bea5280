"""The path of a gradient, from DDP's bucket to the mean that DDP puts back, top to bottom."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # what DDP gives to a hook; `torch.distributed` has it too
from torch.nn import Parameter as TorchParameter

from lightning_commopt.compression import Compression, Scratch, Uncompressed, kernels
from lightning_commopt.compression.pending import Parts
from lightning_commopt.measure import CommStats, Recorder, Traffic, clock_for
from lightning_commopt.routes.bucket import BucketState, Share, parameters_of, parts_of
from lightning_commopt.routes.choose import route_for
from lightning_commopt.routes.mean_check import MeanCheck
from lightning_commopt.routes.message import PRESENT, TERMINATE
from lightning_commopt.routes.node import NodeExchange
from lightning_commopt.routes.packing import fold_second_hop, gather, unpack
from lightning_commopt.routes.route import Parcel, Route, add_residual
from lightning_commopt.routes.stream import stream_for
from lightning_commopt.routes.termination import Termination
from lightning_commopt.routes.transport import transport_for
from lightning_commopt.routes.usage import Usage

__all__ = ["GradientPath"]

_ERROR_EVERY = 50  # rounds between two samples of the compression error


class GradientPath:
    """Bucket ready, + residual, encode, travel, decode, mean, bucket; the new residual waits until the step is applied.

    Register :meth:`hook` with DDP; call :meth:`begin_round` before and :meth:`finish_round` after each synchronising
    backward, and :meth:`step_done` after each optimizer step, on every rank alike.

    Args:
        parameters: The trainable parameters by name.
        method: The compression method.
        group: The ranks among which encoded gradients travel: all of them, or, where the exchange is hierarchical,
            those with the same place on every node.
        device: Where gradients are.
        node_group: The ranks of this node, where the exchange is hierarchical.
        start_step: Optimizer steps to be applied before the method begins; until then rounds are dense.
        dense_buckets: So many buckets travel densely all the time: those that become ready first.
        shadow: Whether a step may be skipped after its gradients were exchanged.
        track_usage: Whether parameters may stay unused, so that each rank must say which it used.

    """

    def __init__(
        self,
        parameters: Mapping[str, TorchParameter],
        method: Compression,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        node_group: dist.ProcessGroup | None = None,
        start_step: int = 0,
        dense_buckets: int = 0,
        shadow: bool = True,
        track_usage: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.method = method
        self.device = device
        self.kernels = kernels.prepare(method, device)
        self.start_step = start_step
        self.dense_buckets = dense_buckets
        self.shadow = shadow
        self.rounds = self.hook_calls = self.applied_steps = self.skipped_steps = 0
        self.scratch = Scratch(device)
        self.recorder = Recorder(clock_for(device))
        self.termination = Termination()
        self.stream = stream_for(device)
        self.transport = transport_for(group, device)
        self.node: NodeExchange | None = None
        if node_group is not None:
            self.node = NodeExchange(transport_for(node_group, device), self.scratch, self.recorder)
        self.route = route_for(method, self.transport, self.scratch, self.recorder)
        self._dense = Uncompressed()
        self._dense_route = route_for(self._dense, self.transport, self.scratch, self.recorder)
        self._names = {id(p): name for name, p in parameters.items()}
        self._buckets: dict[tuple[int, ...], BucketState] = {}
        self._loaded: dict[str, Parts] = {}
        self._usage = Usage(self._watched) if track_usage else None
        self._resumed = 0, 0
        self._results: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # the last round's gradients, to see changes
        self._promised = Traffic()
        self._dense_bytes = 0
        self._error_samples: list[Tensor] = []
        self._loss_scale: Callable[[], Tensor | None] = lambda: None
        self._scale: Tensor | None = None
        self._calls_before = 0
        self._handed_over = 0  # parameters in this round
        self._last_hook: object = None
        self._first_flags: Tensor | None = None  # of this round's first bucket, set on any rank
        self.mean_check = MeanCheck([self.transport, *([] if self.node is None else [self.node.transport])])
        self.error_due = False
        """Whether the compression error of the next round is to be sampled whatever its number."""

    # ---- the path -------------------------------------------------------------------------------------------------

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP hands over a bucket: queue its exchange and return at once."""
        kept, gradients = self._bucket(bucket), bucket.buffer()
        terminate = False
        if self.hook_calls == self._calls_before:
            self._scale = self._loss_scale()
            terminate, self._first_flags = self.termination.asked, kept.flags_any
        self.hook_calls += 1
        self._handed_over += len(kept.layout.segments)
        flags = [PRESENT * (self._usage is None or s.parameter.name in self._usage) for s in kept.layout.segments]
        flags[0] |= TERMINATE * terminate
        self._last_hook = self.recorder.clock.mark()
        carry = partial(self._carry, kept, gradients, flags, self.hook_calls)
        return self.stream.submit(carry, gradients, last=bucket.is_last())

    def _carry(self, kept: BucketState, bucket: Tensor, known: list[int], number: int) -> Iterator[None]:
        """Take one bucket from gradients to their mean over ranks, in place; yields while messages are on their way."""
        self.recorder.bucket = position = kept.position
        route, method = self._way(position)
        dense = self._dense_sum(position, bucket)
        with self.recorder.span("encode"):
            residual = kept.first if self.node is None else None
            values, exact, flags = gather(kept, bucket, known, self._scale, self.scratch, residual)
        if self.node is not None:
            self._promised += Traffic(inside_node=self.node.traffic_bytes(values, exact, flags))
            values, exact, flags = self.node.reduce_scatter(values, exact, flags)
            values = add_residual(values, kept.first)

        parcel = self._parcel(kept, method, values, exact, flags, number % route.lanes)
        for _ in self._exchange(kept, parcel, route):
            yield
            self.recorder.bucket = position

        mean, exact_mean = parcel.mean, parcel.exact_mean
        if self.node is not None:
            mean, exact_mean = self.node.all_gather(mean, exact_mean)
        with self.recorder.span("decode"):
            unpack(kept, mean, exact_mean, self._scale, bucket, self._keeps_unused)
        if dense is not None:
            self.mean_check.compare(dense, bucket)
        self._dense_bytes += self._dense_ring_bytes(bucket.nbytes)

    def _dense_sum(self, number: int, bucket: Tensor) -> Tensor | None:
        """Return the dense sum of the bucket of that number where its mean is to be checked."""
        if self.dense or not self.mean_check.due(self.rounds, number - self.dense_buckets):
            return None
        dense, sent = self.mean_check.dense_sum(bucket)
        self._promised += sent
        return dense

    def _way(self, position: int) -> tuple[Route, Compression]:
        """Return how the bucket at a position travels: by the method's route, or densely."""
        if self.dense or position < self.dense_buckets:
            return self._dense_route, self._dense
        return self.route, self.method

    def _exchange(self, kept: BucketState, parcel: Parcel, route: Route) -> Iterator[None]:
        """Encode, travel, decode, mean."""
        if not route.second_hop:
            fold_second_hop(kept, parcel.values, self.transport.world)
        before = _norm(parcel.values) if self._samples_error and route is self.route else None
        self._promised += route.traffic(parcel, self.rounds)
        exchange = route.exchange(parcel, self.rounds)
        travels = next(exchange, False) is None  # encoded, and maybe through already
        if before is not None:
            self._error_samples.append(_norm(parcel.values) / before.clamp_min(1e-300))
        if travels:
            yield
            yield from exchange

    def _parcel(
        self, kept: BucketState, method: Compression, values: Tensor, exact: Tensor, flags: Tensor, lane: int
    ) -> Parcel:
        """Put together what travels; means are written into working memory."""
        wide = torch.promote_types(kept.dtype, torch.float32)
        return Parcel(
            layout=kept.layout,
            start=kept.shard_start,
            method=method,
            dtype=kept.dtype,
            values=values,
            exact=exact,
            flags=flags,
            second=kept.second,
            mean=self.scratch.get("mean", values.shape, torch.float32),
            exact_mean=self.scratch.get("exact_mean", exact.shape, wide),
            flags_any=kept.flags_any,
            state=kept.method_state,
            lane=lane,
        )

    def _bucket(self, bucket: GradBucket) -> BucketState:
        """Return what is kept for a bucket, made when it is first seen."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        kept = self._buckets.get(key)
        if kept is None:
            described = parameters_of([self._names[id(p)] for p in parameters], parameters, self.method)
            dtype = bucket.buffer().dtype
            position = len(self._buckets)
            kept = BucketState(described, self.method, self._share, dtype, self.device, self.shadow, position=position)
            kept.take(self._loaded)
            self._buckets[key] = kept
        return kept

    # ---- rounds and steps -----------------------------------------------------------------------------------------

    @property
    def dense(self) -> bool:
        """Whether this round belongs to the dense beginning."""
        return self.applied_steps < self.start_step

    def begin_round(self, loss_scale: Callable[[], Tensor | None] = lambda: None) -> None:
        """Prepare for a synchronising backward.

        Args:
            loss_scale: Tells the factor that gradients of this backward carry, once backward has begun.

        """
        self._calls_before = self.hook_calls
        self._handed_over = 0
        # while buckets are found, their number differs from rank to rank
        self.mean_check.buckets = max(0, len(self._buckets) - self.dense_buckets)
        self._loss_scale = loss_scale
        if self._samples_error:
            self._error_samples = []
        for kept in self._buckets.values():
            kept.discard(self._thrown_away)

    def _thrown_away(self, name: str) -> bool | Tensor:
        """Whether a gradient was set to None or to zero since the last round."""
        gradient = self.parameters[name].grad
        if gradient is None:
            return True
        result, version = self._results.get(name, (None, None))
        if result is not None and result() is gradient and version == gradient._version:
            return False  # untouched: a sparse method's result may itself be zero
        zeroed = gradient.any().logical_not()
        return zeroed if self.device.type == "cuda" else bool(zeroed)

    def finish_round(self) -> None:
        """Check what backward left behind.

        Raises:
            BaseException: What the exchange raised, with its type and traceback.
            RuntimeError: DDP did not hand over every bucket.

        """
        end = self.recorder.clock.mark()
        self.stream.raise_error()
        if missing := len(self.parameters) - self._handed_over:
            part = f" for {missing} of {len(self.parameters)} parameters" if self._handed_over else ""
            raise RuntimeError(
                f"Method `{self.method.name}` was not called{part} in a synchronising backward, and gradients were not "
                f"exchanged. {self._why_not_called()}"
            )
        self.recorder.add("exposed", self._last_hook, end)
        self.error_due = self.error_due and self.dense
        self.rounds += 1
        assert self._first_flags is not None
        self.termination.round_done(self._first_flags)
        self._agree_on_use()
        for kept in self._buckets.values():
            kept.round_done()
        self._keep_results()
        if self._usage is not None:
            self._usage.forget()

    @property
    def _watched(self) -> Mapping[str, Tensor]:
        """What backward gives gradients to, by the names of the trainable parameters."""
        return self.parameters

    @property
    def _keeps_unused(self) -> bool:
        """Whether what lies in a bucket for a parameter that no rank used is to stay there."""
        return self._usage is not None

    def _agree_on_use(self) -> None:
        """Raise the flags of parameters that only ranks outside the exchange used; here it has all of them."""

    def keep_shadow(self) -> None:
        """From now on, keep what a round writes apart until its step is applied. Call it between rounds."""
        self.shadow = True
        for kept in self._buckets.values():
            kept.keep_shadow()

    def _keep_results(self) -> None:
        """Remember which gradients a backward left, to see whether they are changed before the next one."""
        if self.shadow:
            results = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self._results = {name: (weakref.ref(g), g._version) for name, g in results.items()}

    def _why_not_called(self) -> str:
        """Tell a model of which a part was not used from one of which nothing was."""
        without = [name for name, p in self.parameters.items() if p.grad is None]
        if 0 < len(without) < len(self.parameters):
            return (
                f"`{without[0]}` got no gradient, and DDP waits for it: where a batch may leave parameters unused, set "
                "`find_unused_parameters=True`, or append `_find_unused_parameters_true` to the strategy's name."
            )
        return "The loss of this batch depends on no trainable parameter, or another hook replaced ours."

    def nonfinite_parameters(self, *, here: bool = False) -> list[str]:
        """Names of the parameters whose gradient was not finite in the last round.

        Args:
            here: Only on this rank. Otherwise on some rank, and the answer is the same on all.

        """
        return [name for kept in self._buckets.values() for name in kept.nonfinite_names(here)]

    def step_done(self, applied: bool | Tensor, names: frozenset[str] | None = None) -> None:
        """Tell whether the optimizer stepped; pending state becomes final, or is forgotten.

        Args:
            applied: A bool, or a 0-d bool tensor on the device that is not waited for once the method has begun.
            names: The optimizer's parameters; None for all.

        """
        if isinstance(applied, Tensor) and (self.dense or self.device.type == "cpu"):
            applied = bool(applied.item())
        for kept in self._buckets.values():
            kept.commit(applied, names)
        if isinstance(applied, bool):
            self.applied_steps += applied
            self.skipped_steps += not applied
        else:
            self.applied_steps += 1  # only the dense beginning depends on it, and that is over

    def clear_nonfinite(self) -> None:
        """Zero residuals that the last round spoiled, where there is no shadow to protect them."""
        for kept in self._buckets.values():
            kept.clear_nonfinite()

    # ---- state and statistics -------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.transport.world * (1 if self.node is None else self.node.transport.world)

    @property
    def keeps_residuals(self) -> bool:
        """Whether a checkpoint without this rank's residuals would lose something."""
        return self.method.error_feedback

    @property
    def shards(self) -> int:
        """Ranks of a node that share every bucket; 1 where the exchange is flat."""
        return self._share.shards

    def whole_numel(self, name: str) -> int:
        """Elements of a parameter over all ranks that share it."""
        return self.parameters[name].numel()

    def _dense_ring_bytes(self, nbytes: int) -> int:
        """Bytes that a rank would send for a bucket without a method."""
        return 2 * (self.world - 1) * nbytes // self.world

    @property
    def _share(self) -> Share:
        shards, shard = (1, 0) if self.node is None else (self.node.transport.world, self.node.transport.rank)
        return Share(shards, shard, self.route.owners, self.transport.rank if self.route.owners > 1 else 0)

    @property
    def _samples_error(self) -> bool:
        return (self.error_due or self.rounds % _ERROR_EVERY == 0) and not self.dense

    def state(self) -> dict[str, Parts]:
        """Return this rank's final state: residuals as ``"first"`` and ``"second"``, the method's own by its name."""
        return parts_of(self._buckets.values(), self._loaded)

    def resume(self, rounds: int, applied_steps: int) -> None:
        """Continue the count of rounds and applied steps; statistics begin at zero all the same."""
        self.rounds, self.applied_steps = rounds, applied_steps
        self._resumed = rounds, applied_steps

    def load_state(self, state: Mapping[str, Parts]) -> None:
        """Take state as :meth:`state` gave it; what it does not name keeps its initial value."""
        self._loaded = {kind: dict(parts) for kind, parts in state.items()}
        for kept in self._buckets.values():
            kept.take(self._loaded)

    def follow(self, parameters: Mapping[str, TorchParameter]) -> None:
        """Go on with other trainable parameters, after the module was wrapped again. State stays, by name.

        What was exchanged and waits for a step counts as applied.

        Args:
            parameters: The trainable parameters by name.

        """
        for kept in self._buckets.values():
            kept.commit(True, None)
        self._loaded = self.state()
        self._buckets = {}
        self.parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        if self._usage is not None:
            self._usage.follow(self._watched)

    def flush(self, steps: int = 1) -> None:
        """Exchange densely until so many further steps are applied: that sends and clears all residuals."""
        self.start_step = self.applied_steps + steps

    def switch(self, method: Compression) -> None:
        """Go on with another method, with the same buckets. Call it between steps, on all ranks alike.

        First-hop residuals stay, by name. Second-hop residuals become part of this rank's first-hop residual, once for
        each owner, since a mean follows. What the new method has no place for is lost: :meth:`flush` before.
        """
        self.follow(self.parameters)
        second, first = self._loaded.pop("second", {}), self._loaded.get("first", {})
        for name, pieces in second.items():
            for start, values in pieces:
                for place, whole in first[name]:
                    if place <= start < place + len(whole):
                        whole[start - place : start - place + len(values)].add_(values, alpha=self.transport.world)
        self._loaded = {"first": first}
        self._error_samples, self.error_due, self.mean_check.cosine = [], True, None
        self.method = method
        self.kernels = kernels.prepare(method, self.device)
        self.route = route_for(method, self.transport, self.scratch, self.recorder)

    def stats(self) -> CommStats:
        """Return the sums so far."""
        self.recorder.settle()
        times = self.recorder.totals_ms
        errors = [float(sample) for sample in list(self._error_samples)]
        inside = 0 if self.node is None else self.node.transport.sent_bytes
        return CommStats(
            method=self.method.name,
            world_size=self.world,
            rounds=self.rounds - self._resumed[0],
            hook_calls=self.hook_calls,
            applied_steps=self.applied_steps - self._resumed[1],
            skipped_steps=self.skipped_steps,
            promised=self._promised,
            sent_bytes=self.transport.sent_bytes + inside,
            dense_bytes=self._dense_bytes,
            encode_ms=times["encode"],
            decode_ms=times["decode"],
            collective_ms=times["collective"],
            wait_ms=self.recorder.wait_ms,
            exposed_ms=times["exposed"],
            compression_error=max(errors) if errors else None,
            memory_bytes=self.scratch.nbytes + sum(kept.nbytes for kept in self._buckets.values()),
        )

    def expected_memory_bytes(self, largest_bucket: int) -> int:
        """Return about the bytes that the run will take on this rank, before the first round has taken them.

        Args:
            largest_bucket: Elements in DDP's largest bucket, for which there is working memory.

        """
        compressed = sum(p.numel() for p in self.parameters.values() if not self.method.travels_exactly(p.shape))
        shards = self._share.shards
        state = self.method.memory_bytes(compressed // shards)
        state += state // self.transport.world if self.route.second_hop else 0
        bucket = min(largest_bucket, compressed)
        share = bucket // shards
        packed = share * (1 if self.method.error_feedback else 2)
        if self.node is not None:
            packed = 3 * share + 4 * bucket  # sent, received and gathered in the node
        copies = 2 if self.route.owners > 1 else self.transport.world + 1  # sent and received
        under_way = min(self.route.lanes * bucket, compressed) // shards
        return state * (2 if self.shadow else 1) + 4 * packed + copies * self.method.wire_bytes(under_way)

    def close(self) -> None:
        """End the stream; state and statistics stay readable."""
        self.stream.close()
        if self._usage is not None:
            self._usage.close()


def _norm(values: Tensor) -> Tensor:
    """The 2-norm, in float64: squares of very large or small gradients leave the range of fp32."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm
