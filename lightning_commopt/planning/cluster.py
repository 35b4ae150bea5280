"""What it is trained on."""

from dataclasses import dataclass
from math import inf

from lightning_commopt.tuning.links import Channel
from lightning_commopt.tuning.plan import CodecCost

__all__ = ["Cluster"]

_MOST_DEVICES = 1 << 16
_RATES = ("memory_rate", "inter_rate", "intra_rate")
_LEAST = {"memory": (1e6, "1 MB"), "flops_per_second": (1e6, "0.000001")} | dict.fromkeys(_RATES, (1e3, "1 kB/s"))
_MOST = 1e24


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
        devices: All of them.
        per_node: On a node.
        memory: Bytes of one.
        flops_per_second: Of one, at its peak in the precision that is used.
        utilisation: Part of the peak that a training step reaches.
        memory_rate: Bytes a second to and from its memory: what codecs and optimizers take time from.
        inter_rate: Bytes a second that a node sends to other nodes, all of its ranks together.
        intra_rate: Bytes a second that one device sends to others of its node.
        inter_latency_ms: Of an empty message between nodes.
        intra_latency_ms: Inside one.
        straggler: How many times as long the slowest rank computes.
        kind: ``"cuda"`` or ``"cpu"``.
        stolen_ns_per_byte: Time by which computing is delayed for each byte sent, measured.
        contention: Part of a codec's time by which computing is delayed.
        codecs: What methods cost, measured, by their words; of the others it is assumed.

    """

    devices: int
    per_node: int
    memory: float
    flops_per_second: float
    utilisation: float = 0.4
    memory_rate: float = 1.5e12
    inter_rate: float = 3.125e9
    intra_rate: float = 3e11
    inter_latency_ms: float = 0.02
    intra_latency_ms: float = 0.005
    straggler: float = 1.0
    kind: str = "cuda"
    stolen_ns_per_byte: float = 0.0
    contention: float = 1.0
    codecs: tuple[tuple[str, CodecCost], ...] = ()

    def __post_init__(self) -> None:
        if self.devices < 1 or self.per_node < 1:
            raise ValueError(f"`devices={self.devices}` and `per_node={self.per_node}` must be at least 1.")
        if self.devices > self.per_node and self.devices % self.per_node:
            raise ValueError(
                f"`devices={self.devices}` do not fill nodes of `{self.per_node}`: give a multiple of it, since nodes "
                "are taken to be equal."
            )
        if self.devices > _MOST_DEVICES:
            raise ValueError(f"`devices={self.devices}` must be at most {_MOST_DEVICES}.")
        for name, (least, words) in _LEAST.items():
            if not least <= getattr(self, name) <= _MOST:
                raise ValueError(f"`{name}` must be a number of at least {words}.")
        for name in ("inter_latency_ms", "intra_latency_ms"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"`{name}` must be at least 0.")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"`utilisation={self.utilisation}` must be above 0 and at most 1.")
        if not 1 <= self.straggler < inf:
            raise ValueError(f"`straggler={self.straggler}` must be at least 1: times as long as the others.")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.devices // self.per_node)

    @property
    def local(self) -> int:
        """Devices in use on a node."""
        return min(self.devices, self.per_node)

    def ring_share(self, ranks: int, in_node: int, rings: int = 1) -> float:
        """Return the bytes that a node sends to others for each byte that a rank of a ring sends; as :meth:`ring`."""
        return float(rings) if ranks > in_node else 0.0

    def ring(self, ranks: int, in_node: int, rings: int = 1) -> Channel:
        """Return what a ring of ranks costs each of them: it crosses every node's border once.

        Args:
            ranks: In the ring.
            in_node: Of them on a node.
            rings: Others like it at the same time through the same node's border.

        """
        share = self.ring_share(ranks, in_node, rings)
        if not share:
            return Channel(self.intra_rate, self.intra_latency_ms, self.stolen_ns_per_byte)
        rate = min(self.intra_rate, self.inter_rate / share) if in_node > 1 else self.inter_rate / share
        crossing = 1 / in_node
        latency_ms = crossing * self.inter_latency_ms + (1 - crossing) * self.intra_latency_ms
        return Channel(rate, latency_ms, self.stolen_ns_per_byte)

    def all_to_all_share(self, ranks: int, in_node: int, groups: int = 1) -> float:
        """Return the same where every rank sends to every other; as :meth:`all_to_all`."""
        return groups * in_node * (ranks - in_node) / (ranks - 1) if ranks > in_node else 0.0

    def all_to_all(self, ranks: int, in_node: int, groups: int = 1) -> Channel:
        """Return what messages of every rank to every other cost each of them: they share the node's border.

        Args:
            ranks: Of the group.
            in_node: Of them on a node.
            groups: Such groups on a node at the same time.

        """
        share = self.all_to_all_share(ranks, in_node, groups)
        if not share:
            return Channel(self.intra_rate, self.intra_latency_ms, self.stolen_ns_per_byte)
        return Channel(self.inter_rate / share, self.inter_latency_ms, self.stolen_ns_per_byte)
