"""How a step exchanges gradients: each mode has its own copy of the model, optimizer and state."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.links.workload import LEARNING_RATE, initial_model, loss_of
from lightning_commopt.compression import METHODS, Compression, Uncompressed, method_named
from lightning_commopt.measure import ReducerLog
from lightning_commopt.routes import ControlGroup, GradientPath, PinnedDDP
from lightning_commopt.strategies.nonfinite import raise_together

__all__ = ["CAP_MB", "MODES", "Mode"]

CAP_MB = 1
"""Size of a bucket in MB in every mode but DDP's defaults and torch's PowerSGD."""


class Mode:
    """Trains without any exchange: the floor, and the base of the others."""

    hops = 0
    """Messages one after another that a bucket needs at least."""

    def __init__(self) -> None:
        self.module = initial_model()
        self.network: nn.Module = self.module
        self.optimizer = torch.optim.AdamW(self.module.parameters(), LEARNING_RATE)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        return loss_of(self.network(tokens), targets)

    def backward(self, loss: Tensor) -> None:
        """Leave the mean gradients of all ranks in the parameters."""
        self.optimizer.zero_grad()
        loss.backward()

    def step(self) -> None:
        """Apply them."""
        self.optimizer.step()

    @property
    def bucket_numels(self) -> list[int]:
        """Elements in each bucket, in the order in which buckets become ready."""
        return []

    @property
    def codec_s(self) -> float:
        """CPU seconds so far of the thread that encodes, decodes and issues messages, where there is one."""
        return 0.0

    @property
    def payload_bytes(self) -> int:
        """Bytes so far that this rank promised to send, where a method promises any."""
        return 0

    def close(self) -> None:
        """End what runs beside the main thread."""


class Stock(Mode):
    """DDP as torch has it.

    Args:
        cap_mb: Size of a bucket; None for DDP's default.
        hook: Communication hook.
        state: Makes the hook's state.

    """

    hops = 2

    def __init__(
        self,
        cap_mb: float | None = None,
        hook: Callable[..., Any] | None = None,
        state: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=cap_mb)
        self.network = self.ddp
        if hook is not None:
            self.ddp.register_comm_hook(state(), hook)

    @property
    @override
    def bucket_numels(self) -> list[int]:
        return _bucket_numels(self.ddp)


class Off(Stock):
    """``CommOptStrategy`` with ``"none"``: DDP's own reducer, and our log of it."""

    def __init__(self) -> None:
        super().__init__(CAP_MB)
        self._log = ReducerLog(self.ddp)

    @override
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._log.note_round()


class Compressed(Mode):
    """The gradient path as ``CommOptStrategy`` drives it, compressing from the first step on.

    Args:
        method: The compression method.

    """

    def __init__(self, method: Compression) -> None:
        super().__init__()
        self.ddp = PinnedDDP(self.module, bucket_cap_mb=CAP_MB)
        self.network = self.ddp
        self._raises = method.error_feedback  # the strategy's default for what is not finite
        self._control = ControlGroup()
        self.path = GradientPath(
            dict(self.module.named_parameters()),
            method,
            dist.new_group(),
            torch.device("cpu"),
            start_step=0,
            shadow=not self._raises,
        )
        self.hops = 2 if self.path.route.second_hop or method.summable else 1
        self.ddp.register_comm_hook(None, self.path.hook)
        self._codec_clock = time.pthread_getcpuclockid(self.path.stream._thread.ident)

    @override
    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        self.path.begin_round()
        loss.backward()
        self.path.finish_round()
        if self._raises:
            raise_together(self.path, self._control)

    @override
    def step(self) -> None:
        super().step()
        self.path.step_done(True)

    @property
    @override
    def bucket_numels(self) -> list[int]:
        return _bucket_numels(self.ddp)

    @property
    @override
    def codec_s(self) -> float:
        return time.clock_gettime(self._codec_clock)

    @property
    @override
    def payload_bytes(self) -> int:
        return self.path.stats().promised.total

    @override
    def close(self) -> None:
        self.path.close()


def _bucket_numels(ddp: DistributedDataParallel) -> list[int]:
    """Elements in each bucket of fp32 gradients."""
    log: dict[str, Any] = ddp._get_ddp_logging_data()
    sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
    return [int(size) // 4 for size in str(sizes).split(",")]


def _power_sgd(rank: int) -> Callable[[], Mode]:
    """Torch's PowerSGD from the earliest step that it allows, in one bucket: with several, ranks get out of order."""
    state = partial(powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return partial(Stock, 25, powerSGD_hook.powerSGD_hook, state)


MODES: dict[str, Callable[[], Mode]] = {
    "nosync": Mode,
    "ddp": Stock,
    "ddp_cap1": partial(Stock, CAP_MB),
    "torch_fp16": partial(Stock, CAP_MB, default_hooks.fp16_compress_hook),
    "torch_powersgd1": _power_sgd(1),
    "torch_powersgd4": _power_sgd(4),
    "none": Off,
    **{word: partial(Compressed, method_named(word)) for word, method in METHODS.items() if method is not Uncompressed},
}
"""Every mode by the word that selects it; each call makes a new one. All ranks make the same ones in the same order."""
