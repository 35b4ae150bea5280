"""Reduce-scatter and all-gather of encoded chunks."""

import torch
from typing_extensions import override

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.message import MessageFormat
from lightning_commopt.routes.route import Parcel, Route, add_residual, merge_flags, sum_in_rank_order

__all__ = ["TwoHop"]


class TwoHop(Route):
    """Rank ``r`` owns chunk ``r``: it receives everybody's, adds them in fp32 in rank order, and sends the mean back.

    Both hops are encoded, each with a residual: a rank's own for what it sends, the owner's for the mean of its chunk.
    A rank sends ``2 (W - 1) / W`` of an encoded bucket.
    """

    second_hop = True

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        return self._format(parcel, round).traffic * (2 * (self.transport.world - 1))

    @override
    def exchange(self, parcel: Parcel, round: int) -> None:
        method, world, rank = parcel.method, self.transport.world, self.transport.rank
        form = self._format(parcel, round)
        sent = form.view(self.scratch.get("send", (world, form.row_bytes), torch.uint8))
        got = form.view(self.scratch.get("receive", (world, form.row_bytes), torch.uint8))
        chunks, means = parcel.values.view(world, -1), parcel.mean.view(world, -1)
        chunk = len(chunks[0])
        mine = self.context(parcel, rank * chunk, round, hop=2)
        exact_sum = self.scratch.get("exact_sum", (form.exact,), parcel.exact_mean.dtype)

        with self.recorder.span("encode"):
            sent.flags.copy_(parcel.flags)
            sent.exact.copy_(parcel.exact.view(world, -1))
            for owner in range(world):
                here = self.context(parcel, owner * chunk, round, hop=1)
                method.encode(chunks[owner], sent.payload[owner], here)
        with self.recorder.span("collective"):
            self.transport.all_to_all(sent.rows, got.rows)
        with self.recorder.span("decode"):
            merge_flags(got.flags, parcel.flags_any)
            sum_in_rank_order(got.exact, exact_sum)
            for source in range(world):
                method.decode(got.payload[source], means[rank], mine, add=source > 0)
        with self.recorder.span("encode"):
            mean = add_residual(means[rank].mul_(1 / world), parcel.second)
            sent.flags[0].copy_(parcel.flags_any)
            sent.exact[0].copy_(exact_sum.mul_(1 / world))
            method.encode(mean, sent.payload[0], mine)
        with self.recorder.span("collective"):
            self.transport.all_gather(sent.rows[0], got.rows)
        with self.recorder.span("decode"):
            parcel.exact_mean.view(world, -1).copy_(got.exact)
            for owner in range(world):
                method.decode(got.payload[owner], means[owner], self.context(parcel, owner * chunk, round, hop=2))

    def _format(self, parcel: Parcel, round: int) -> MessageFormat:
        world = self.transport.world
        chunk = len(parcel.values) // world
        contexts = (self.context(parcel, owner * chunk, round, hop=1) for owner in range(world))
        payload = max(parcel.method.payload_bytes(chunk, context) for context in contexts)  # rows have one length
        return MessageFormat(len(parcel.flags), len(parcel.exact) // world, parcel.dtype, payload)
