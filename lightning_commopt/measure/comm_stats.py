"""What the exchange of gradients did so far."""

from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["CommStats", "Traffic"]

_STATE = ("method", "world_size", "compression_error", "memory_bytes")


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends, by what they are.

    Args:
        payload: Encoded gradients.
        exact: Gradients that travel exactly (norms, biases, small tensors).
        header: Flags of each parameter, and padding.
        inside_node: Everything that travels inside a node, where the exchange is hierarchical or the model is sharded.

    """

    payload: int = 0
    exact: int = 0
    header: int = 0
    inside_node: int = 0

    @property
    def total(self) -> int:
        """All bytes that leave the rank."""
        return self.payload + self.exact + self.header + self.inside_node

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.payload + other.payload,
            self.exact + other.exact,
            self.header + other.header,
            self.inside_node + other.inside_node,
        )

    def __sub__(self, other: "Traffic") -> "Traffic":
        return self + other * -1

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.payload * times, self.exact * times, self.header * times, self.inside_node * times)


@dataclass(frozen=True)
class CommStats:
    """Sums since the fit began, on this rank. ``later - earlier`` gives those of a window.

    Args:
        method: The compression method in force.
        world_size: Ranks that exchange gradients.
        rounds: Exchanges of all buckets (one for each synchronising backward).
        hook_calls: Buckets handed over by DDP. 0 where DDP's own reducer does the work.
        applied_steps: Optimizer steps that were applied.
        skipped_steps: Optimizer steps that were skipped because of a non-finite gradient.
        promised: Bytes that the method promises to send, by kind; computed from sizes alone.
        sent_bytes: Bytes counted where collectives are issued, inside nodes and between them. Where DDP's own reducer
            does the work nothing can be counted, and the promise is repeated.
        dense_bytes: Bytes that plain DDP sends for the same rounds.
        encode_ms: Time spent encoding.
        decode_ms: Time spent decoding.
        collective_ms: Duration of this rank's collectives: transfer and waiting for the others.
        wait_ms: The part of it in which this rank waited for a slower one, known once ranks have compared
            (:meth:`CommOptStrategy.gather_comm_stats`); None before.
        exposed_ms: Time in which backward had nothing left to compute and waited for the exchange.
        compression_error: Largest ``||residual|| / ||input||`` of a bucket, sampled; None when not sampled.
        memory_bytes: Extra memory in use.

    """

    method: str
    world_size: int
    rounds: int = 0
    hook_calls: int = 0
    applied_steps: int = 0
    skipped_steps: int = 0
    promised: Traffic = Traffic()
    sent_bytes: int = 0
    dense_bytes: int = 0
    encode_ms: float = 0.0
    decode_ms: float = 0.0
    collective_ms: float = 0.0
    wait_ms: float | None = None
    exposed_ms: float = 0.0
    compression_error: float | None = None
    memory_bytes: int = 0

    @property
    def transfer_ms(self) -> float | None:
        """Time of the collectives without waiting; None before ranks have compared."""
        return None if self.wait_ms is None else self.collective_ms - self.wait_ms

    @property
    def compression_ratio(self) -> float | None:
        """Bytes of plain DDP over bytes sent (between nodes, where it is hierarchical); None before any was sent."""
        sent = self.sent_bytes - self.promised.inside_node
        return self.dense_bytes / sent if sent else None

    def __add__(self, later: "CommStats") -> "CommStats":
        """Return both together; the state of things (method, memory, error) is the later one's."""
        changes: dict[str, Any] = {}
        for spec in fields(self):
            if spec.name in _STATE:
                continue
            mine, other = getattr(self, spec.name), getattr(later, spec.name)
            both_unknown = mine is None and other is None
            changes[spec.name] = (
                None if both_unknown else other if mine is None else mine if other is None else mine + other
            )
        return replace(later, **changes)

    def __sub__(self, earlier: "CommStats") -> "CommStats":
        """Return what happened since ``earlier``; the state of things (method, memory, error) is the later one's."""
        changes: dict[str, Any] = {}
        for spec in fields(self):
            if spec.name in _STATE:
                continue
            mine, other = getattr(self, spec.name), getattr(earlier, spec.name)
            changes[spec.name] = None if mine is None else mine - (other or type(mine)())
        return replace(self, **changes)
