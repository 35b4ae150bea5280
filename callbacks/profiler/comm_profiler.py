"""The callback that profiles a few steps."""

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from typing_extensions import override

from lightning_commopt.callbacks.profiler.tools import KinetoTool, NvtxTool, Tool, nsys_command
from lightning_commopt.callbacks.profiler.trace import TraceTimes, read_trace, times_of

__all__ = ["CommProfiler"]


class CommProfiler(Callback):
    """Profile a few optimizer steps on every rank, and say how much of the communication hides under compute.

    At the end of the fit each rank writes ``rank<r>.json`` into ``folder``, a trace for https://ui.perfetto.dev or
    ``chrome://tracing``, and rank 0 prints the times of all ranks. Under :class:`~lightning_commopt.CommOptStrategy`
    with a method in force, traces have spans ``lightning_commopt::encode``, ``all_gather`` (or another collective) and
    ``decode``; elsewhere the collectives are those of the backend. The steps take longer while they are recorded;
    ``CommMonitor`` leaves them out of its averages.

    Args:
        start_step: ``trainer.global_step`` from which on steps are recorded; later in a fit that is resumed behind it.
        steps: Optimizer steps to record.
        folder: Where traces go; each rank writes on its own machine.
        nvtx: Instead of a trace, emit NVTX ranges for Nsight Systems: start the script with the ``nsys profile``
            command that is printed. CUDA only.

    Raises:
        ValueError: An option is out of its bounds; with ``nvtx``, there is no GPU; or the Trainer has a PyTorch
            profiler of its own, and there can be one.

    Attributes:
        times: What the traces say, by rank, the same on all ranks; empty before the end of a fit.

    """

    def __init__(
        self, start_step: int = 10, steps: int = 3, folder: str | Path = "commopt-profile", nvtx: bool = False
    ) -> None:
        for name, value, least in (("start_step", start_step, 0), ("steps", steps, 1)):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        self.start_step = start_step
        self.steps = steps
        self.folder = Path(folder)
        self.nvtx = nvtx
        self.times: tuple[TraceTimes, ...] = ()
        self._tool: Tool | None = None
        self._running = False
        self._global_step = self._recorded = 0

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        self._drop()
        self.times = ()
        device = trainer.strategy.root_device
        if self.nvtx and device.type != "cuda":
            raise ValueError(f"`nvtx=True` needs CUDA, and this run is on {device.type}: leave it out to get a trace.")
        if isinstance(trainer.profiler, PyTorchProfiler):
            raise ValueError(
                "Only one PyTorch profiler can run: drop `Trainer(profiler='pytorch')`, or the callback `CommProfiler`."
            )
        self._tool = NvtxTool() if self.nvtx else KinetoTool(device)
        if self.nvtx:
            rank_zero_info(f"CommProfiler: emits NVTX ranges; run {nsys_command(self.folder)}")

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._global_step = trainer.global_step
        self._recorded = 0

    @property
    def records(self) -> bool:
        """Whether the batch that runs, or is about to begin, is recorded: it takes longer for it."""
        return self._running or self._is_due

    @property
    def _is_due(self) -> bool:
        return self._tool is not None and not self._recorded and self._global_step >= self.start_step

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", *args: Any) -> None:
        if self._tool is not None and not self._running and self._is_due:
            self._tool.start()
            self._running = True

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", *args: Any) -> None:
        before, self._global_step = self._global_step, trainer.global_step
        if self._tool is None or not self._running or self._global_step == before:
            return
        self._recorded += self._global_step - before
        if self._recorded < self.steps:
            self._tool.step()
        else:
            self._stop()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._stop()
        if self._recorded < self.steps:
            rank_zero_warn(
                f"`CommProfiler(start_step={self.start_step}, steps={self.steps})` recorded {self._recorded} steps: "
                f"the fit ended at step {trainer.global_step}. Let it begin earlier."
            )
        if self._recorded and isinstance(self._tool, KinetoTool):
            self._read(trainer, self._tool)
        self._tool = None

    @override
    def on_exception(self, *args: Any) -> None:
        self._drop()

    @override
    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._drop()

    def _read(self, trainer: "pl.Trainer", tool: KinetoTool) -> None:
        """Write this rank's trace, and print what all of them say. A collective."""
        path = self.folder / f"rank{trainer.global_rank}.json"
        tool.export(path)
        device = trainer.strategy.root_device
        own = times_of(read_trace(path), self._recorded, cuda=device.type == "cuda")
        everyone = trainer.strategy.all_gather(torch.tensor(astuple(own), device=device, dtype=torch.float32))
        self.times = tuple(TraceTimes(*row) for row in everyone.view(-1, len(astuple(own))).tolist())
        rank_zero_info(_table(self.times, self._recorded))
        rank_zero_info(
            f"Traces are in {self.folder.resolve()}: open them at https://ui.perfetto.dev. On a GPU, Nsight Systems "
            f"records the same with `CommProfiler(nvtx=True)` and\n  {nsys_command(self.folder)}"
        )

    def _stop(self) -> None:
        if self._tool is not None and self._running:
            self._tool.stop()
        self._running = False

    def _drop(self) -> None:
        """Forget a recording."""
        self._stop()
        self._tool = None


def _table(times: Sequence[TraceTimes], steps: int) -> str:
    """Lay out the times of all ranks."""
    lines = [f"CommProfiler: ms a step, from traces of {steps} steps"]
    lines.append(f"  {'rank':>4} {'step':>9} {'compute':>9} {'comm.':>9} {'overlap':>9} {'exposed':>9} {'codec':>9}")
    for rank, t in enumerate(times):
        numbers = (t.step_ms, t.compute_ms, t.communication_ms, t.overlap_ms, t.exposed_ms, t.codec_ms)
        lines.append(f"  {rank:>4} " + " ".join(f"{number:9.3f}" for number in numbers))
    return "\n".join(lines)
