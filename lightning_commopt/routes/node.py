"""Inside a node: full precision, before and after the exchange between nodes."""

import torch
from torch import Tensor

from lightning_commopt.compression import Scratch
from lightning_commopt.compression.layout import round_up
from lightning_commopt.measure import Recorder
from lightning_commopt.routes.message import MessageFormat
from lightning_commopt.routes.route import merge_flags, sum_in_rank_order
from lightning_commopt.routes.transport import Transport

__all__ = ["NodeExchange"]


class NodeExchange:
    """Shares every bucket between the ranks of a node: each takes one shard of the node's mean to the other nodes.

    Source: the hierarchical all-reduce of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677), section 4.

    Args:
        transport: Between the ranks of this node.
        scratch: Working memory.
        recorder: Times the work.

    """

    def __init__(self, transport: Transport, scratch: Scratch, recorder: Recorder) -> None:
        self.transport = transport
        self.scratch = scratch
        self.recorder = recorder

    def reduce_scatter(self, values: Tensor, exact: Tensor, flags: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's shard of the node's mean.

        Args:
            values: fp32, shape ``(n,)``, the packed gradients of this rank.
            exact: Shape ``(e,)``, its exact ones.
            flags: uint8, shape ``(P,)``.

        Returns:
            The mean values, shape ``(n / L,)``; the mean exact ones, shape ``(e / L,)``, in fp32 or wider; the flags
            set on any rank of the node.

        """
        ranks = self.transport.world
        form = MessageFormat(len(flags), len(exact) // ranks, exact.dtype, 4 * (len(values) // ranks))
        sent = form.view(self.scratch.get("node_send", (ranks, form.row_bytes), torch.uint8))
        got = form.view(self.scratch.get("node_receive", (ranks, form.row_bytes), torch.uint8))
        wide = torch.promote_types(exact.dtype, torch.float32)
        shard = self.scratch.get("shard", (len(values) // ranks,), torch.float32)
        exact_shard = self.scratch.get("exact_shard", (form.exact,), wide)
        flags_any = self.scratch.get("node_flags", flags.shape, torch.uint8)
        with self.recorder.span("encode"):
            sent.flags.copy_(flags)
            sent.exact.copy_(exact.view(ranks, -1))
            sent.payload.view(torch.float32).copy_(values.view(ranks, -1))
        with self.recorder.span("collective"):
            self.transport.all_to_all(sent.rows, got.rows).wait()
        with self.recorder.span("decode"):
            merge_flags(got.flags, flags_any)
            sum_in_rank_order(got.exact, exact_shard)
            sum_in_rank_order(got.payload.view(torch.float32), shard)
        return shard.mul_(1 / ranks), exact_shard.mul_(1 / ranks), flags_any

    def all_gather(self, mean: Tensor, exact_mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole mean from every rank's shard of it.

        Args:
            mean: fp32, shape ``(n / L,)``.
            exact_mean: Shape ``(e / L,)``.

        Returns:
            Shapes ``(n,)`` and ``(e,)``, views of working memory or copies of it.

        """
        ranks, exact_bytes = self.transport.world, exact_mean.nbytes
        payload_at = round_up(exact_bytes, 16)
        row = self.scratch.get("node_row", (payload_at + mean.nbytes,), torch.uint8)
        rows = self.scratch.get("node_rows", (ranks, len(row)), torch.uint8)
        row[:exact_bytes].copy_(exact_mean.view(torch.uint8))
        row[payload_at:].copy_(mean.view(torch.uint8))
        with self.recorder.span("collective"):
            self.transport.all_gather(row, rows).wait()
        exact = rows[:, :exact_bytes].view(exact_mean.dtype)
        return rows[:, payload_at:].view(torch.float32).flatten(), exact.flatten()

    def traffic_bytes(self, values: Tensor, exact: Tensor, flags: Tensor) -> int:
        """Return the bytes that this rank sends inside its node for one bucket."""
        ranks = self.transport.world
        form = MessageFormat(len(flags), len(exact) // ranks, exact.dtype, 4 * (len(values) // ranks))
        wide = torch.promote_types(exact.dtype, torch.float32)
        back = round_up(form.exact * wide.itemsize, 16) + form.payload_bytes
        return (ranks - 1) * (form.row_bytes + back)
