"""Hooks that DeepSpeed leaves in a module."""

import weakref
from typing import Any

from torch.nn import Module

__all__ = ["note_hooks", "remove_hooks"]

_OWNERS: "weakref.WeakKeyDictionary[Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
"""What holds the hooks of a module: they keep it alive."""


def note_hooks(module: Module, engine: Any) -> None:
    """Remember whose hooks an engine has put into a module."""
    if hasattr(engine.optimizer, "destroy"):
        _OWNERS[module] = weakref.ref(engine.optimizer)


def remove_hooks(module: Module) -> None:
    """Remove those of an earlier engine, which would reduce and gather beside those of the next one."""
    owner = _OWNERS.pop(module, lambda: None)()
    if owner is not None:
        owner.destroy()
