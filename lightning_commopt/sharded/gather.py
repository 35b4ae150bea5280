"""All-gather of encoded parameters inside a node."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compression import BucketLayout, Compression, Context, Parameter, Scratch, kernels
from lightning_commopt.compression.layout import gaps_between
from lightning_commopt.measure import Traffic
from lightning_commopt.routes import Transport
from lightning_commopt.routes.message import MessageFormat
from lightning_commopt.sharded.parameters import ShardedParameter

__all__ = ["GatherCodec", "EncodedGather"]


class GatherCodec:
    """Encodes parameters before FSDP2 gathers them.

    A rank sends its shards of all parameters of a group in one message: matrices encoded, small tensors as they are.
    Every rank computes with what was sent, its own shards included, so that all compute with the same parameters. The
    shards themselves, which the optimizer updates, stay as they are.

    Args:
        method: How matrices are encoded.
        transport: Between the ranks of a node.
        device: Where parameters are.

    """

    def __init__(self, method: Compression, transport: Transport, device: torch.device) -> None:
        self.method = method
        self.transport = transport
        self.device = device
        self.round = 0
        """Seed of stochastic rounding: the same for all gathers between two optimizer steps."""
        self.promised = Traffic()
        kernels.prepare(method, device)
        self._scratches: dict[int, Scratch] = {}

    @property
    def scratch(self) -> Scratch:
        """Working memory of the current stream: FSDP2 gathers on several."""
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        return self._scratches.setdefault(stream, Scratch(self.device))

    @property
    def nbytes(self) -> int:
        """Bytes of working memory."""
        return sum(scratch.nbytes for scratch in self._scratches.values())

    def gather(self, layout: BucketLayout, shard: Tensor, out: Tensor) -> None:
        """Write what all ranks sent.

        Args:
            layout: Of the shards of a group.
            shard: Shape ``(n,)``; may be a part of ``out``.
            out: Shape ``(W, n)``.

        """
        world, scratch, method = self.transport.world, self.scratch, self.method
        payload = method.payload_bytes(layout.packed_numel, self._context(layout, scratch, self.transport.rank))
        form = MessageFormat(0, layout.exact_numel, shard.dtype, payload)
        sent = form.view(scratch.get("gather_send", (1, form.row_bytes), torch.uint8))
        got = form.view(scratch.get("gather_receive", (world, form.row_bytes), torch.uint8))
        values = scratch.get("gather_values", (layout.packed_numel,), torch.float32)
        for segment in layout.compressed:
            values[segment.packed].copy_(shard[segment.in_bucket])
        for gap in gaps_between([s.packed for s in layout.compressed], layout.packed_numel):
            values[gap].zero_()
        for segment in layout.exact:
            sent.exact[0, segment.packed].copy_(shard[segment.in_bucket])
        method.encode(values, sent.payloads[0], self._context(layout, scratch, self.transport.rank))
        self.promised += Traffic(inside_node=form.traffic.total) * (world - 1)
        self.transport.all_gather(sent.rows[0], got.rows).wait()
        for source in range(world):
            method.decode(got.payloads[source], values, self._context(layout, scratch, source))
            for segment in layout.compressed:
                out[source, segment.in_bucket].copy_(values[segment.packed])
            for segment in layout.exact:
                out[source, segment.in_bucket].copy_(got.exact[source, segment.packed])

    def _context(self, layout: BucketLayout, scratch: Scratch, rank: int) -> Context:
        return Context(layout, 0, self.round, rank, 1, scratch)


class EncodedGather:
    """What FSDP2 calls in place of an all-gather, for one of its groups.

    Args:
        codec: Shared by all groups.
        inner: FSDP2's own, which allocates.
        parameters: Of the group.

    """

    def __init__(self, codec: GatherCodec, inner: Any, parameters: Sequence[ShardedParameter]) -> None:
        self._codec, self._inner = codec, inner
        described = [Parameter(p.name, tuple(p.shape), p.travels_exactly(codec.method)) for p in parameters]
        self._layout = BucketLayout(described, codec.method.alignment, 1)

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return memory as FSDP2's own would."""
        memory: Tensor = self._inner.allocate(*args, **kwargs)
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather at once; work that follows on the same stream waits by itself."""
        if input_tensor.numel() != self._layout.numel:
            raise RuntimeError(
                f"FSDP2 gathers {input_tensor.numel()} elements of a group that has {self._layout.numel}: leave "
                "`shard_gather` out."
            )
        self._codec.gather(self._layout, input_tensor, output_tensor.view(group.size(), -1))
