"""How many samples a batch holds."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["samples_in"]


def samples_in(batch: Any) -> int | None:
    """Return the samples of a batch; None where its parts do not agree, instead of a guess.

    What counts is the first dimension of tensors and arrays, at any depth of mappings, lists, tuples and data classes.
    Texts and numbers count where there is nothing else: a list of them has as many samples as entries.

    Args:
        batch: As ``training_step`` gets it; None has no samples.

    """
    if batch is None:
        return 0
    dimensions = list(_first_dimensions(batch))
    for sizes in ({size for size in dimensions if size is not None}, set(_lengths(batch))):
        if sizes:
            return sizes.pop() if len(sizes) == 1 else None
    return 1 if dimensions else None


def _parts(value: Any) -> list[Any] | None:
    """Return what a container holds, None where a value is none."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return None


def _first_dimensions(value: Any) -> Iterator[int | None]:
    """Yield the first dimension of each tensor, None where it is a single number."""
    parts = _parts(value)
    if parts is not None:
        for part in parts:
            yield from _first_dimensions(part)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield int(value.shape[0]) if len(value.shape) else None


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each list of plain values."""
    parts = _parts(value)
    if parts and not isinstance(value, Mapping) and all(isinstance(part, str | bytes | int | float) for part in parts):
        yield len(parts)
    else:
        for part in parts or ():
            yield from _lengths(part)
