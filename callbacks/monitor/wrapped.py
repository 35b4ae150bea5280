"""Methods of Lightning's objects that are timed while a fit runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

__all__ = ["WrappedMethods"]


class WrappedMethods:
    """Puts context managers around bound methods of single objects, until :meth:`restore`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: object, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Let every call of ``owner.name`` run inside ``around()``. No effect where the method does not exist."""
        method = getattr(owner, name, None)
        if method is None:
            return
        own = vars(owner)
        had_own = name in own

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with around():
                return method(*args, **kwargs)

        setattr(owner, name, call)
        self._undo.append(lambda: setattr(owner, name, method) if had_own else delattr(owner, name))

    def restore(self) -> None:
        """Give all methods back, the last one first. No effect the second time."""
        while self._undo:
            self._undo.pop()()
