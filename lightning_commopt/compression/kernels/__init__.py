"""Compiled kernels: the same payload, decoded values and residual as plain torch, bit for bit, sooner.

A method's own file holds its arithmetic in plain torch, which is always there and runs on every device. Chunks on the
CPU are encoded and decoded by a kernel instead where numba is installed (``pip install 'lightning-commopt[cpu]'``), and
those on CUDA devices where Triton is (it comes with torch's builds for CUDA). For comparison, ``COMMOPT_KERNELS=torch``
in the environment (for all processes) or :func:`use` (for this one) leaves kernels out; with ``numba`` or ``triton`` it
is an error that the compiler of the device at hand is not installed.

One folder a compiler: a module of it has ``kernel_of(method)``.
"""

import importlib
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.kernels.choice import (
    Compiler,
    Kernels,
    compiler_for,
    is_forced,
    leave_out,
    use,
)
from lightning_commopt.compression.kernels.kernel import Kernel
from lightning_commopt.compression.kernels.trial import encode_and_decode

__all__ = ["Compiler", "Kernels", "columns_for", "compiler_for", "kernel_for", "packing_for", "prepare", "use"]

_MODULES: dict[Compiler, dict[str, str]] = {
    "torch": {},
    "numba": {"int8": "quantized", "int4": "quantized", "onebit": "signs", "topk": "largest"},
    "triton": {"int8": "quantized", "int4": "quantized", "onebit": "signs"},
}


def prepare(method: Compression, device: torch.device) -> Compiler:
    """Compile a method's kernel, or load it, so that the first step does not wait for it.

    Unless it is asked for by name, a compiler that does not work here (Triton needs a C compiler, and a GPU that it
    knows) is warned about and left out.

    Returns:
        What will encode and decode on that device: ``"numba"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: ``COMMOPT_KERNELS`` is none of the words of :func:`use`.
        ModuleNotFoundError: It asks for the compiler of that device, which is not installed, and the method has a
            kernel there.

    """
    forced = is_forced()
    if not any(method.name in modules for modules in _MODULES.values()) or _kernel_of(method, device.type) is None:
        return "torch"
    compiler = compiler_for(device.type)
    if compiler == "triton":  # which compiles at the first launch
        try:
            encode_and_decode(method, device)
        except Exception as error:
            if forced:
                raise
            warnings.warn(f"Triton does not work on {device}, so codecs run in plain torch: {error}", stacklevel=2)
            leave_out(device.type)
            return "torch"
    return compiler


def kernel_for(method: Compression, *tensors: Tensor) -> Kernel | None:
    """Return the kernel that may take these tensors, None where the method's own torch code is to run.

    Kernels write to plain, contiguous memory of one device; fake tensors and those of other devices have none.
    """
    return _kernel_of(method, tensors[0].device.type) if _plain(*tensors) else None


def _kernel_of(method: Compression, device_type: str) -> Kernel | None:
    """Return a method's kernel. A subclass has none: it may compute something else."""
    compiler = compiler_for(device_type)
    name = _MODULES[compiler].get(method.name)
    if name is None:
        return None
    return _found(method, f"{__name__}.{compiler}.{name}")


@lru_cache
def _found(method: Compression, module: str) -> Kernel | None:
    kernel: Kernel | None = importlib.import_module(module).kernel_of(method)
    return kernel


def packing_for(*tensors: Tensor) -> ModuleType | None:
    """Return compiled ways between a bucket and what travels, if they may take these tensors; None: torch does it.

    The CPU has them, for fp32: :mod:`~lightning_commopt.compression.kernels.numba.packing`.
    """
    if any(tensor.dtype != torch.float32 for tensor in tensors) or not _numba_takes(*tensors):
        return None
    return importlib.import_module(f"{__name__}.numba.packing")


def columns_for(values: Tensor) -> Callable[..., None] | None:
    """Return what measures the columns of a chunk (:class:`ColumnScales`); None: torch does it."""
    if not _numba_takes(values):
        return None
    measure: Callable[..., None] = importlib.import_module(f"{__name__}.numba.signs").measure
    return measure


def _numba_takes(*tensors: Tensor) -> bool:
    return _plain(*tensors) and tensors[0].device.type == "cpu" and compiler_for("cpu") == "numba"


def _plain(*tensors: Tensor) -> bool:
    """Whether a kernel may write to tensors: they lie in plain, contiguous memory of one device."""
    device = tensors[0].device
    return all(
        type(tensor) is Tensor and tensor.device == device and tensor.is_contiguous() and not tensor.requires_grad
        for tensor in tensors
    )
