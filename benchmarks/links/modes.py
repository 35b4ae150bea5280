"""How a step exchanges gradients: each mode has its own copy of the model, optimizer and state."""

import sys
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
from lightning_commopt.tuning import AutoPolicy, Choice, Observed, Tuner, Ways

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


class Automatic(Mode):
    """``compression="auto"``: begins as DDP's defaults, and becomes what the tuner says.

    Args:
        policy: What it may take.

    """

    def __init__(self, policy: AutoPolicy) -> None:
        super().__init__()
        self._control, self._policy, world = ControlGroup(), policy, dist.group.WORLD
        assert world is not None
        self.ddp = DistributedDataParallel(self.module)
        self.network, self._log = self.ddp, ReducerLog(self.ddp)
        self._log.sample_often()
        self.path: GradientPath | None = None
        self._group = dist.new_group()
        self.tuner: Tuner | None = None
        self._ways = Ways(world, self._group)

    @override
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.tuner is None:  # here, so that it counts as part of the first step
            named, device = dict(self.module.named_parameters()), torch.device("cpu")
            self.tuner = Tuner(self._policy, self._control, self._ways, device, named, self._observe)
            self.tuner.start()
        decided = len(self.tuner.state.decisions)
        choice = self.tuner.before_step()
        if dist.get_rank() == 0 and (len(self.tuner.state.decisions) > decided or self.tuner.verified_now):
            print(f"auto, after {self.tuner.rounds} exchanges: {self.tuner.words()}", file=sys.stderr, flush=True)
        if choice is not None:
            self._switch(choice)
        return super().forward(tokens, targets)

    def _switch(self, choice: Choice) -> None:
        """Change the method; what a quantised method owes goes over to the next one."""
        method = method_named(choice.method)
        if self.path is not None and method.error_feedback:
            if method != self.path.method:
                self.path.switch(method)
            self.path.dense_buckets = choice.dense_buckets
            return
        self.ddp._remove_autograd_hooks()
        if self.path is not None:
            self.path.close()
            self.path = None
        if isinstance(method, Uncompressed):
            self.ddp = DistributedDataParallel(self.module, init_sync=False)
            self._log.follow(self.ddp)
        else:
            self.ddp = PinnedDDP(self.module, bucket_cap_mb=choice.bucket_mb, init_sync=False)
            named = dict(self.module.named_parameters())
            self.path = GradientPath(named, method, self._group, torch.device("cpu"), shadow=not method.error_feedback)
            self.ddp.register_comm_hook(None, self.path.hook)
            self.path.dense_buckets = choice.dense_buckets
            self.path.error_due = True
            self.path.mean_check.every = self._policy.cosine_every
        self.network = self.ddp

    def _observe(self) -> Observed:
        if self.path is None:
            self._log.compare_waiting(self._control.all_gather)
            return Observed(self._log.stats())
        self.path.recorder.compare_waiting(self._control.all_gather)
        cosine = self.path.mean_check.cosine
        return Observed(self.path.stats(), None if cosine is None else float(cosine))

    @override
    def backward(self, loss: Tensor) -> None:
        assert self.tuner is not None
        self.optimizer.zero_grad()
        if self.path is not None:
            self.path.begin_round()
        self.tuner.backward_begins()
        loss.backward()
        if self.path is None:
            self._log.note_round()
            self.tuner.backward_ended()
            return
        self.path.finish_round()
        self.tuner.backward_ended()
        if self.path.method.error_feedback:
            raise_together(self.path, self._control)

    @override
    def step(self) -> None:
        super().step()
        if self.path is not None:
            self.path.step_done(True)
        assert self.tuner is not None
        self.tuner.step_ended()

    @property
    @override
    def hops(self) -> int:  # type: ignore[override]
        return 2 if self.path is None or self.path.route.second_hop else 1

    @property
    @override
    def bucket_numels(self) -> list[int]:
        return _bucket_numels(self.ddp)

    @override
    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()
        if self.path is not None:
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
    "auto": partial(Automatic, AutoPolicy()),
    "auto_onebit": partial(Automatic, AutoPolicy(allow=("onebit",))),
    **{word: partial(Compressed, method_named(word)) for word, method in METHODS.items() if method is not Uncompressed},
}
"""Every mode by the word that selects it; each call makes a new one. All ranks make the same ones in the same order."""
