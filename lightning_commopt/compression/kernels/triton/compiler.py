"""How kernels are compiled and started: with arithmetic as written, and for few kinds of arguments."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["INTERPRETED", "LARGEST_BLOCK", "compiled", "launch", "part_of_kernels"]

F = TypeVar("F", bound=Callable[..., Any])

LARGEST_BLOCK = 8192
"""Elements of the largest block that a program holds in its registers."""

_TILE = 2048  # elements a program


def part_of_kernels(function: F) -> F:
    """Let kernels call a function; it is compiled into each of them."""
    return cast(F, triton.jit(function))


def compiled(*unspecialised: str) -> Callable[[F], F]:
    """Make a kernel of a function, which :func:`launch` starts.

    Triton compiles it for each new combination of types, constants, and arguments that are 1 or divisible by 16.

    Args:
        unspecialised: Arguments whose value changes nothing, so that a new one compiles nothing: sizes, and pointers to
            little.

    """

    def compile(function: F) -> F:
        made = triton.jit(function, do_not_specialize=unspecialised, do_not_specialize_on_alignment=unspecialised)
        return cast(F, made)

    return compile


def launch(kernel: Any, blocks: int, size: int, *arguments: Tensor | int, **constants: bool | float) -> None:
    """Start a kernel on the device and stream of its first argument; the host does not wait.

    A product and a sum are never fused to one operation that rounds once: torch rounds twice.

    Args:
        kernel: Takes ``arguments``, ``constants``, and as constants ``SIZE``, elements in a block, and ``ROWS``, blocks
            that a program works on. Both are powers of two.
        blocks: Number of blocks.
        size: Elements in a block.
        arguments: The kernel's arguments, a tensor first.
        constants: The kernel's constants.

    """
    rows = max(1, _TILE // size)
    programs = -(-blocks // rows)
    if not programs:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](
            *arguments,
            **constants,
            SIZE=size,
            ROWS=rows,
            num_warps=4 if size <= _TILE else 8,
            enable_fp_fusion=False,
        )


@part_of_kernels
def _nothing() -> None:
    tl.static_assert(True)


INTERPRETED = not isinstance(_nothing, triton.runtime.JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when Triton was imported: kernels then take tensors of the CPU, slowly."""
