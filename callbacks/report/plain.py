"""Dataclasses as what JSON can hold, and back."""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return lists, mappings, numbers and words; numbers that are not finite, which JSON has none of, as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    return value


def from_plain(kind: type[T], value: Any, where: str = "") -> T:
    """Return an object of a dataclass from what :func:`to_plain` made of it.

    Fields that the class does not have are left out, those that are missing have their default.

    Raises:
        ValueError: The value does not fit the annotations; with the place.

    """
    result: T = _read(kind, value, where)
    return result


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _read(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if _is_named_tuple(kind):
        return kind(*_read_items(list(get_type_hints(kind).values()), value, where))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_read_items(arguments, value, where))
    if origin in (tuple, Sequence):
        return tuple(_read(arguments[0], inner, f"{where}[{i}]") for i, inner in enumerate(_list(value, where)))
    return _read_scalar(kind, value, where)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"`{where or kind.__name__}` is not an object.")
    hints, inside = get_type_hints(kind), f"{where}." if where else ""
    known = [field for field in dataclasses.fields(kind) if field.init]
    for field in known:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in value:
            raise ValueError(f"`{inside}{field.name}` is missing.")
    return kind(**{f.name: _read(hints[f.name], value[f.name], f"{inside}{f.name}") for f in known if f.name in value})


def _read_items(kinds: Sequence[Any], value: Any, where: str) -> list[Any]:
    items = _list(value, where)
    if len(items) != len(kinds):
        raise ValueError(f"`{where}` has {len(items)} items instead of {len(kinds)}.")
    return [_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True))]


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"`{where}` is not a list.")
    return value


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"`{where}` is {value!r} and not of the type `{kind.__name__}`.")
    return value


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
