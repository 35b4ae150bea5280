"""Which compiler's kernels run on which kind of device: what is asked for, and what is installed."""

import os
import warnings
from importlib import import_module
from typing import Literal, get_args

__all__ = ["Compiler", "Kernels", "compiler_for", "is_forced", "leave_out", "use"]

Kernels = Literal["auto", "torch", "numba", "triton"]
Compiler = Literal["torch", "numba", "triton"]

_VARIABLE = "COMMOPT_KERNELS"
_OF_DEVICE: dict[str, Literal["numba", "triton"]] = {"cpu": "numba", "cuda": "triton"}
_INSTALLS = {"numba": "pip install 'lightning-commopt[cpu]'", "triton": "pip install triton"}

_asked: Kernels | None = None  # None: what the environment says
_settled: dict[str, Compiler] = {}  # by type of device


def use(kernels: Kernels) -> None:
    """Choose what encodes and decodes in this process, and in those forked from it.

    Args:
        kernels: ``"torch"``, ``"numba"`` (on the CPU), ``"triton"`` (on CUDA devices), or ``"auto"``: on each the one
            that is installed. Where a compiler has no kernels for a device, plain torch runs.

    Raises:
        ValueError: It is none of them.
        ModuleNotFoundError: The compiler that is asked for is not installed.

    """
    global _asked
    _check(kernels, "kernels")
    if kernels in _INSTALLS:
        _is_installed(kernels, required=f"kernels={kernels!r}")
    _asked = kernels
    _settled.clear()


def compiler_for(device_type: str) -> Compiler:
    """Return what encodes and decodes on a type of device; settled when first asked for.

    Raises:
        ValueError: ``COMMOPT_KERNELS`` is none of the words of :func:`use`.
        ModuleNotFoundError: It asks for this device's compiler, which is not installed.

    """
    if device_type not in _settled:
        _settled[device_type] = _settle(device_type)
    return _settled[device_type]


def is_forced() -> bool:
    """Whether a word other than ``auto`` is in force.

    Raises:
        ValueError: See :func:`compiler_for`.

    """
    return _word()[0] != "auto"


def leave_out(device_type: str) -> None:
    """Let plain torch run on a type of device from now on."""
    _settled[device_type] = "torch"


def _word() -> tuple[str, str]:
    """Return what is asked for, and by what."""
    if _asked is not None:
        return _asked, "kernels"
    word = os.environ.get(_VARIABLE) or "auto"
    _check(word, _VARIABLE)
    return word, _VARIABLE


def _check(word: str, source: str) -> None:
    """Refuse a word that names nothing."""
    if word not in get_args(Kernels):
        raise ValueError(f"`{source}={word!r}` must be one of {', '.join(map(repr, get_args(Kernels)))}.")


def _settle(device_type: str) -> Compiler:
    """Decide between torch and a compiler."""
    word, source = _word()
    compiler = _OF_DEVICE.get(device_type)
    if word == "triton" and device_type == "cpu" and _is_installed(word) and _triton_is_interpreted():
        return "triton"
    if compiler is None or word not in ("auto", compiler):
        return "torch"
    return compiler if _is_installed(compiler, required=f"{source}={word!r}" if word != "auto" else "") else "torch"


def _is_installed(compiler: str, required: str = "") -> bool:
    """Whether a compiler can be imported; where it cannot and is ``required`` by something, it is an error."""
    try:
        import_module(compiler)
    except ModuleNotFoundError as error:
        if not required and error.name == compiler:
            return False
        raise ModuleNotFoundError(
            f"`{required or 'auto'}` needs {compiler}: `{_INSTALLS[compiler]}`, or choose 'torch'."
        ) from error
    except ImportError as error:  # numba refuses versions of numpy that it does not know
        if required:
            raise
        warnings.warn(
            f"{compiler} is installed but cannot be imported, so codecs run in plain torch: {error}", stacklevel=2
        )
        return False
    return True


def _triton_is_interpreted() -> bool:
    """Whether Triton's kernels take tensors of the CPU: for tests, without any GPU."""
    return bool(import_module(f"{__package__}.triton.compiler").INTERPRETED)
