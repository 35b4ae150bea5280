"""Everybody sends its encoded bucket to everybody."""

import torch
from typing_extensions import override

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.message import MessageFormat
from lightning_commopt.routes.route import Parcel, Route, merge_flags, sum_in_rank_order

__all__ = ["OnePhase"]


class OnePhase(Route):
    """One all-gather of encoded buckets; every rank decodes all of them and adds in rank order.

    A rank sends ``(W - 1) b`` bytes against ``2 (W - 1) / W b`` of two hops: the same for two ranks, at half the
    latency and without a second quantisation.
    """

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        return self._format(parcel, round).traffic * (self.transport.world - 1)

    @override
    def exchange(self, parcel: Parcel, round: int) -> None:
        method, world = parcel.method, self.transport.world
        form = self._format(parcel, round)
        sent = form.view(self.scratch.get("send", (1, form.row_bytes), torch.uint8))
        got = form.view(self.scratch.get("receive", (world, form.row_bytes), torch.uint8))
        here = self.context(parcel, 0, round, hop=1)

        with self.recorder.span("encode"):
            sent.flags[0].copy_(parcel.flags)
            sent.exact[0].copy_(parcel.exact)
            method.encode(parcel.values, sent.payload[0], here)
        with self.recorder.span("collective"):
            self.transport.all_gather(sent.rows[0], got.rows)
        with self.recorder.span("decode"):
            merge_flags(got.flags, parcel.flags_any)
            sum_in_rank_order(got.exact, parcel.exact_mean)
            for rank in range(world):
                method.decode(got.payload[rank], parcel.mean, here, add=rank > 0)
            parcel.exact_mean.mul_(1 / world)
            parcel.mean.mul_(1 / world)

    def _format(self, parcel: Parcel, round: int) -> MessageFormat:
        payload = parcel.method.payload_bytes(len(parcel.values), self.context(parcel, 0, round, hop=1))
        return MessageFormat(len(parcel.flags), len(parcel.exact), parcel.dtype, payload)
