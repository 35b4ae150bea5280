"""Where a bucket's exchange runs, so that the hook returns at once."""

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["CommStream", "CudaStream", "ThreadStream"]

Job = Callable[[], Iterator[None]]
"""Begins an exchange, which yields whenever its messages are on their way."""


class CommStream(ABC):
    """Runs exchanges in the order in which they were submitted.

    An error never reaches DDP's reducer (which would lose its type and be left unfinished): it is kept, everything
    submitted later is dropped, every future resolves with its untouched buffer, and :meth:`raise_error` raises it on
    the main thread after backward.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @abstractmethod
    def submit(self, job: Job, buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """Queue an exchange.

        Args:
            job: Works on ``buffer`` in place.
            buffer: What the future gives when the exchange is through.
            last: Whether no other follows in this round. The others may wait for the next one to begin.

        """

    @abstractmethod
    def close(self) -> None:
        """End the stream; rounds whose last exchange was submitted are brought to their end."""

    def raise_error(self) -> None:
        """Raise what a job raised, with its type and traceback."""
        if self.error is not None:
            raise self.error

    def _goes_on(self, exchange: Iterator[None]) -> bool:
        """Take an exchange up to where it yields next; False where it is through, or some exchange failed."""
        if self.error is not None:
            return False
        try:
            with torch.no_grad():
                next(exchange)
        except StopIteration:
            return False
        except BaseException as error:  # it is raised again on the main thread
            self.error = error
            return False
        return True


class _UnderWay(NamedTuple):
    exchange: Iterator[None]
    buffer: Tensor
    future: torch.futures.Future[Tensor]


class ThreadStream(CommStream):
    """For the CPU: a thread of its own. Torch releases the interpreter while it computes or waits for the network.

    Exchanges overlap. When one is submitted, it goes up to its first messages, and then each of those before it up to
    its next ones, the newest first. This order depends on no clock, so it is the same on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._jobs: queue.SimpleQueue[tuple[_UnderWay, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lightning_commopt", daemon=True)
        self._thread.start()

    @override
    def submit(self, job: Job, buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put((_UnderWay(job(), buffer, future), last))
        return future

    @override
    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        """Carry exchanges until the end is asked for."""
        under_way: list[_UnderWay] = []
        while (item := self._jobs.get()) is not None:
            newest, last = item
            under_way = self._advanced([newest, *under_way])
            while last and under_way:
                under_way = self._advanced(under_way)

    def _advanced(self, under_way: Sequence[_UnderWay]) -> list[_UnderWay]:
        """Take each exchange one collective further and return those that are not through."""
        left = []
        for one in under_way:
            if self._goes_on(one.exchange):
                left.append(one)
            else:
                one.future.set_result(one.buffer)
        return left


class CudaStream(CommStream):
    """For CUDA: no thread. Everything is enqueued on a side stream that waits for the gradients' stream."""

    @override
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @override
    def submit(self, job: Job, buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        buffer.record_stream(self._stream)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(self._stream):
            exchange = job()
            while self._goes_on(exchange):
                pass
            future.set_result(buffer)  # records this stream: the compute stream will wait for it, the host will not
        return future

    @override
    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a failed device cannot be waited for; its error is already kept
            self._stream.synchronize()


def stream_for(device: torch.device) -> CommStream:
    """Return the stream that fits a device."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()
