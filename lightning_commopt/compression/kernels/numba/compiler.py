"""How kernels are compiled: once a machine, without the interpreter's lock, with arithmetic as written."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import register_jitable

__all__ = ["compiled", "part_of_kernels"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[F], F]:
    """Compile a function for one signature when its module is imported.

    The machine code is kept in ``__pycache__`` beside the module, or in the user's cache folder where that is
    read-only, or in ``NUMBA_CACHE_DIR``; where none can be written, every process compiles. An array of another type,
    rank or order is refused by a ``TypeError``. There is no ``fastmath``: it would change bits.

    Args:
        signature: In numba's notation.

    """

    def compile(function: F) -> F:
        try:
            made: Any = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            made = numba.njit(signature, nogil=True)(function)
        return cast(F, made)

    return compile


def part_of_kernels(function: F) -> F:
    """Let kernels call a function; it is compiled into each of them (whose cache does not see it change)."""
    made: F = register_jitable(function)
    return made
