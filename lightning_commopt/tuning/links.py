"""What joins the ranks, as far as a prediction needs it."""

from dataclasses import dataclass

__all__ = ["Channel", "Link"]


@dataclass(frozen=True)
class Channel:
    """What a way of travelling costs a rank, measured with the same operations that a step will use.

    Args:
        bytes_per_second: That a rank sends while all ranks send.
        latency_ms: Of one message that carries nothing.
        stolen_ns_per_byte: Time by which computing is delayed for each byte that is sent beside it: on a CPU the
            network's own work runs on the cores that compute.

    """

    bytes_per_second: float
    latency_ms: float
    stolen_ns_per_byte: float = 0.0

    def slower(self, factor: float) -> "Channel":
        """Return a channel on which everything takes ``factor`` times as long."""
        return Channel(self.bytes_per_second / factor, self.latency_ms * factor, self.stolen_ns_per_byte * factor)

    def wire_ms(self, nbytes: float, hops: int) -> float:
        """Time to send ``nbytes`` in ``hops`` messages, one after the other."""
        return nbytes / self.bytes_per_second * 1e3 + hops * self.latency_ms

    def stolen_ms(self, nbytes: float) -> float:
        """Time by which computing is delayed."""
        return nbytes * self.stolen_ns_per_byte * 1e-6


@dataclass(frozen=True)
class Link:
    """What joins the ranks.

    Args:
        world: Number of ranks.
        reducer: All-reduce over all ranks, as DDP's own reducer uses it.
        route: Messages of encoded gradients: between all ranks, or between nodes where the exchange is hierarchical.
        ranks_per_node: Ranks that reduce inside their node first; 1: the exchange is flat.
        inside: Messages inside a node, where the exchange is hierarchical.

    """

    world: int
    reducer: Channel
    route: Channel
    ranks_per_node: int = 1
    inside: Channel | None = None

    def slower(self, factor: float) -> "Link":
        """Return a link on which everything takes ``factor`` times as long."""
        inside = None if self.inside is None else self.inside.slower(factor)
        return Link(self.world, self.reducer.slower(factor), self.route.slower(factor), self.ranks_per_node, inside)
