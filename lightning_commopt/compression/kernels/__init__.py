"""Compiled kernels for the CPU: the same payload, decoded values and residual as plain torch, bit for bit, sooner.

A method's own file holds its arithmetic in plain torch, which is always there and runs on every device. Where numba is
installed (``pip install 'lightning-commopt[cpu]'``), chunks on the CPU are encoded and decoded by a kernel instead. For
comparison, ``COMMOPT_KERNELS=torch`` in the environment (for all processes) or :func:`use` (for this one) leaves
kernels out; with ``numba`` it is an error that numba is not installed.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_commopt.compression.base import Compression
from lightning_commopt.compression.kernels.kernel import Kernel

__all__ = ["Kernels", "columns_for", "in_use", "kernel_for", "packing_for", "prepare", "use"]

Kernels = Literal["auto", "torch", "numba"]

_VARIABLE = "COMMOPT_KERNELS"
_MODULES = {"int8": "quantized", "int4": "quantized", "onebit": "signs", "topk": "largest"}

_chosen: Literal["torch", "numba"] | None = None  # None: not settled yet


def use(kernels: Kernels) -> None:
    """Choose what encodes and decodes on the CPU in this process, and in those forked from it.

    Args:
        kernels: ``"torch"``, ``"numba"``, or ``"auto"``: numba where it is installed.

    Raises:
        ValueError: It is none of them.
        ModuleNotFoundError: numba is asked for and not installed.

    """
    global _chosen
    _chosen = _settled(kernels, "kernels")


def in_use() -> Literal["torch", "numba"]:
    """Return what encodes and decodes on the CPU; settled by the environment when first asked for.

    Raises:
        ValueError: ``COMMOPT_KERNELS`` is none of the words of :func:`use`.
        ModuleNotFoundError: It asks for numba, which is not installed.

    """
    global _chosen
    if _chosen is None:
        _chosen = _settled(os.environ.get(_VARIABLE) or "auto", _VARIABLE)
    return _chosen


def prepare(method: Compression, device: torch.device) -> Literal["torch", "numba"]:
    """Compile a method's kernel, or load it, so that the first step does not wait for it.

    Returns:
        What will encode and decode on that device: ``"numba"`` or ``"torch"``.

    Raises:
        ValueError: See :func:`in_use`.
        ModuleNotFoundError: See :func:`in_use`, where the method has a kernel for that device.

    """
    if _chosen is None:
        _check(os.environ.get(_VARIABLE) or "auto", _VARIABLE)
    return "numba" if device.type == "cpu" and _kernel_of(method) is not None else "torch"


def kernel_for(method: Compression, *tensors: Tensor) -> Kernel | None:
    """Return the kernel that may take these tensors, None where the method's own torch code is to run.

    Kernels write to plain, contiguous memory of the CPU; fake tensors and those of other devices have none.
    """
    return _kernel_of(method) if all(map(_plain, tensors)) else None


def _kernel_of(method: Compression) -> Kernel | None:
    """Return a method's kernel. A subclass has none: it may compute something else."""
    name = _MODULES.get(method.name)
    if name is None or in_use() == "torch":
        return None
    return _found(name, method)


@lru_cache
def _found(name: str, method: Compression) -> Kernel | None:
    kernel: Kernel | None = importlib.import_module(f"{__name__}.{name}").kernel_of(method)
    return kernel


def packing_for(*tensors: Tensor) -> ModuleType | None:
    """Return :mod:`~lightning_commopt.compression.kernels.packing` if it may take these tensors, else None."""
    if in_use() == "torch" or not all(tensor.dtype == torch.float32 and _plain(tensor) for tensor in tensors):
        return None
    return importlib.import_module(f"{__name__}.packing")


def columns_for(values: Tensor) -> Callable[..., None] | None:
    """Return what measures the columns of a chunk (:class:`ColumnScales`), None where torch is to do it."""
    if in_use() == "torch" or not _plain(values):
        return None
    measure: Callable[..., None] = importlib.import_module(f"{__name__}.signs").measure
    return measure


def _plain(tensor: Tensor) -> bool:
    """Whether a kernel may write to a tensor."""
    ordinary = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    return ordinary and not tensor.requires_grad


def _check(kernels: str, source: str) -> None:
    """Refuse a word that names nothing."""
    if kernels not in get_args(Kernels):
        words = ", ".join(map(repr, get_args(Kernels)))
        raise ValueError(f"`{source}={kernels!r}` must be one of {words}.")


def _settled(kernels: str, source: str) -> Literal["torch", "numba"]:
    """Decide between torch and numba."""
    _check(kernels, source)
    if kernels == "torch":
        return "torch"
    try:
        importlib.import_module("numba")
    except ModuleNotFoundError as error:
        if kernels == "auto" and error.name == "numba":
            return "torch"
        raise ModuleNotFoundError(
            f"`{source}={kernels!r}` needs numba: `pip install 'lightning-commopt[cpu]'`, or choose 'torch'."
        ) from error
    except ImportError as error:  # numba refuses versions of numpy that it does not know
        if kernels == "numba":
            raise
        warnings.warn(f"numba is installed but cannot be imported, so codecs run in plain torch: {error}", stacklevel=2)
        return "torch"
    return "numba"
