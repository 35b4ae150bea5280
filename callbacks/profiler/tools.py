"""The two tools that record: torch's own profiler, and NVTX ranges for Nsight Systems."""

import contextlib
import shlex
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from typing_extensions import override

__all__ = ["KinetoTool", "NvtxTool", "Tool", "nsys_command"]


class Tool(ABC):
    """Records from :meth:`start` to :meth:`stop`."""

    @abstractmethod
    def start(self) -> None:
        """Begin with the first step."""

    @abstractmethod
    def step(self) -> None:
        """End a step that another one follows."""

    @abstractmethod
    def stop(self) -> None:
        """End with the last step."""


class KinetoTool(Tool):
    """``torch.profiler``.

    Args:
        device: Whose kernels to record besides the operators of the CPU.

    Raises:
        RuntimeError: This version of torch cannot record the thread that exchanges on the CPU.

    """

    def __init__(self, device: torch.device) -> None:
        activities, config = [ProfilerActivity.CPU], None
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            try:
                config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            except TypeError as error:
                raise RuntimeError(
                    f"torch {torch.__version__} cannot profile all threads, and gradients are exchanged in one of "
                    "their own: `CommProfiler` on the CPU needs a newer torch."
                ) from error
        self._profile = profile(
            activities=activities,
            schedule=lambda step: ProfilerAction.RECORD,  # without any, steps are not marked
            experimental_config=config,
        )

    @override
    def start(self) -> None:
        self._profile.start()

    @override
    def step(self) -> None:
        self._profile.step()

    @override
    def stop(self) -> None:
        self._profile.stop()

    def export(self, path: Path) -> None:
        """Write the trace in Chrome's format."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))


class NvtxTool(Tool):
    """A range of NVTX for every operator and every ``lightning_commopt::…`` span, and CUDA's marks for `nsys`."""

    def __init__(self) -> None:
        self._ranges = contextlib.ExitStack()

    @override
    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        self._ranges.enter_context(torch.autograd.profiler.emit_nvtx())

    @override
    def step(self) -> None:
        torch.cuda.nvtx.mark("step")

    @override
    def stop(self) -> None:
        self._ranges.close()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def nsys_command(folder: Path) -> str:
    """Return the command that records this script's profiled steps with Nsight Systems."""
    options = "--trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop"
    return f"nsys profile {options} --output={shlex.quote(str(folder / 'nsys'))} python {shlex.join(sys.argv)}"
