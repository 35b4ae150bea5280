"""What work in another thread takes from computing."""

import threading
import time
from collections.abc import Callable

import torch

__all__ = ["Computing"]

_ALONE_S = 0.03


class Computing:
    """A loop of small matrix products on the CPU, whose speed alone is known."""

    def __init__(self) -> None:
        self._a = torch.randn(192, 192)
        self._out = torch.empty(192, 192)
        self._chunk()
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < _ALONE_S:
            self._chunk()
            count += 1
        self._chunk_s = elapsed / count

    def lost_s(self, work: Callable[[], object]) -> float:
        """Return the seconds of computing that were lost while ``work`` ran in a thread of its own."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised again below
                errors.append(error)

        thread = threading.Thread(target=run, name="lightning_commopt_probe", daemon=True)
        start, count = time.perf_counter(), 0
        thread.start()
        while thread.is_alive():
            self._chunk()
            count += 1
        elapsed = time.perf_counter() - start
        thread.join()
        if errors:
            raise errors[0]
        return max(0.0, elapsed - count * self._chunk_s)

    def _chunk(self) -> None:
        torch.mm(self._a, self._a, out=self._out)
