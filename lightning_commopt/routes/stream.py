"""Where a bucket's exchange runs, so that the hook returns at once."""

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["CommStream", "CudaStream", "ThreadStream"]

Job = Callable[[], None]


class CommStream(ABC):
    """Runs exchanges one after another, in the order in which they were submitted.

    An error never reaches DDP's reducer (which would lose its type and be left unfinished): it is kept, everything
    submitted later is dropped, every future resolves with its untouched buffer, and :meth:`raise_error` raises it on
    the main thread after backward.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @abstractmethod
    def submit(self, job: Job, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Queue ``job``, which works on ``buffer`` in place; the future gives ``buffer`` when it is done."""

    @abstractmethod
    def close(self) -> None:
        """End the stream; jobs that were submitted run first."""

    def raise_error(self) -> None:
        """Raise what a job raised, with its type and traceback."""
        if self.error is not None:
            raise self.error

    def _run(self, job: Job) -> None:
        """Run a job unless an earlier one failed."""
        if self.error is not None:
            return
        try:
            with torch.no_grad():
                job()
        except BaseException as error:  # it is raised again on the main thread
            self.error = error


class ThreadStream(CommStream):
    """For the CPU: a thread of its own. Torch releases the interpreter while it computes or waits for the network."""

    def __init__(self) -> None:
        super().__init__()
        self._jobs: queue.SimpleQueue[tuple[Job, Tensor, torch.futures.Future[Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lightning_commopt", daemon=True)
        self._thread.start()

    @override
    def submit(self, job: Job, buffer: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put((job, buffer, future))
        return future

    @override
    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        """Run jobs until the end is asked for."""
        while (item := self._jobs.get()) is not None:
            job, buffer, future = item
            self._run(job)
            future.set_result(buffer)


class CudaStream(CommStream):
    """For CUDA: no thread. Everything is enqueued on a side stream that waits for the gradients' stream."""

    @override
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @override
    def submit(self, job: Job, buffer: Tensor) -> torch.futures.Future[Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        buffer.record_stream(self._stream)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(self._stream):
            self._run(job)
            future.set_result(buffer)  # records this stream: the compute stream will wait for it, the host will not
        return future

    @override
    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a failed device cannot be waited for; its error is already kept
            self._stream.synchronize()


def stream_for(device: torch.device) -> CommStream:
    """Return the stream that fits a device."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()
