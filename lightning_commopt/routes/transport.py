"""The one place where gradient collectives are issued."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function  # the public one takes 25 us

__all__ = ["GlooTransport", "NcclTransport", "Operation", "Transport", "Travelling"]

_NOTICED_S = 1.5e-4  # asking for messages that are there takes less


class Operation(NamedTuple):
    """One collective as it was issued: its name, and the bytes that this rank puts on the wire for it."""

    name: str
    sent_bytes: int


class Travelling:
    """Messages under way.

    Args:
        works: What must be through; none where later work on the same stream waits by itself.

    """

    def __init__(self, works: Sequence[dist.Work] = ()) -> None:
        self._works = works

    def wait(self) -> bool:
        """Wait until the messages of this rank are through and those for it are there.

        Returns:
            Whether that took time: otherwise they were through before, nobody knows since when.

        """
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        return not self._works or time.perf_counter() - start > _NOTICED_S


class Transport(ABC):
    """Exchanges byte rows between the ranks of one group and counts what it sends.

    Every rank must issue the same operations in the same order; :attr:`issued` keeps the last of them for comparison.

    Args:
        group: The process group that carries the gradients.

    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.sent_bytes = 0
        self.issued: deque[Operation] = deque(maxlen=10_000)

    def all_to_all(self, send: Tensor, receive: Tensor) -> Travelling:
        """Begin to send row ``r`` to rank ``r``; row ``r`` of ``receive`` comes from rank ``r``. Both: ``(W, n)``."""
        self._issue("all_to_all", send[0].nbytes * (self.world - 1))
        with record_function("lightning_commopt::all_to_all"):
            return self._all_to_all(send, receive)

    def all_gather(self, row: Tensor, receive: Tensor) -> Travelling:
        """Begin to send ``row`` of shape ``(n,)`` to everybody; row ``r`` of ``receive`` comes from rank ``r``."""
        self._issue("all_gather", row.nbytes * (self.world - 1))
        with record_function("lightning_commopt::all_gather"):
            return self._all_gather(row, receive)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks. Counted as a ring sends it: ``2 (W - 1) / W`` of its size."""
        self._issue("all_reduce", self.ring_bytes(tensor.nbytes))
        with record_function("lightning_commopt::all_reduce"):
            dist.all_reduce(tensor, group=self.group)

    def ring_bytes(self, nbytes: int) -> int:
        """Bytes that a rank sends when ``nbytes`` are reduced by a ring."""
        return 2 * (self.world - 1) * nbytes // self.world

    def _issue(self, name: str, sent_bytes: int) -> None:
        """Count an operation."""
        self.sent_bytes += sent_bytes
        self.issued.append(Operation(name, sent_bytes))

    @abstractmethod
    def _all_to_all(self, send: Tensor, receive: Tensor) -> Travelling: ...

    @abstractmethod
    def _all_gather(self, row: Tensor, receive: Tensor) -> Travelling: ...


class GlooTransport(Transport):
    """Point-to-point messages: on gloo they keep the line busy at every size, the collectives do not."""

    def _all_to_all(self, send: Tensor, receive: Tensor) -> Travelling:
        return self._exchange(send.unbind(), receive)

    def _all_gather(self, row: Tensor, receive: Tensor) -> Travelling:
        return self._exchange([row] * self.world, receive)

    def _exchange(self, send: Sequence[Tensor], receive: Tensor) -> Travelling:
        """Exchange a row with every other rank, nearest neighbour first."""
        works = []
        for distance in range(1, self.world):
            source, target = (self.rank - distance) % self.world, (self.rank + distance) % self.world
            works.append(dist.irecv(receive[source], group=self.group, group_src=source))
            works.append(dist.isend(send[target], group=self.group, group_dst=target))
        receive[self.rank].copy_(send[self.rank])
        return Travelling([work for work in works if work is not None])  # None: this rank is not in the group


class NcclTransport(Transport):
    """Collectives on the current stream: a single send or receive could open a new communicator inside backward."""

    def _all_to_all(self, send: Tensor, receive: Tensor) -> Travelling:
        dist.all_to_all_single(receive.view(-1), send.view(-1), group=self.group)
        return Travelling()

    def _all_gather(self, row: Tensor, receive: Tensor) -> Travelling:
        dist.all_gather_into_tensor(receive.view(-1), row.contiguous(), group=self.group)
        return Travelling()


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the transport of a group, warmed by one tiny collective."""
    transport: Transport = NcclTransport(group) if device.type == "cuda" else GlooTransport(group)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return transport
