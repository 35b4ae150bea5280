"""Which layers are divided, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lightning_commopt.pipeline.deferred_linear import is_conv1d

__all__ = ["Column", "Row", "TensorParallelPlan", "around", "can_divide"]


@dataclass(frozen=True)
class Column:
    """Each rank computes some of a layer's output features, from all of its input.

    Args:
        parts: How many equal parts the output consists of, each of which is divided: 3 for queries, keys and values.
        unit: Attribute of the module around the layer: so many features stay together, such as ``"head_dim"``.
        sizes: Attributes of the module around the layer that count what is divided, such as ``"num_heads"``: on each
            rank they become so many times smaller.

    """

    parts: int = 1
    unit: str = ""
    sizes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"`parts={self.parts}` must be at least 1.")


@dataclass(frozen=True)
class Row:
    """Each rank has some of a layer's input features; the outputs are summed over the ranks."""


@dataclass(frozen=True)
class TensorParallelPlan:
    """The layers to divide, Megatron's way: what a column layer puts out goes to a row layer without leaving its rank.

    Patterns are matched with the whole name of a module, as in ``model.named_modules()``; ``*`` stands for anything.

    Args:
        layers: By pattern, :class:`Column` or :class:`Row`, or ``"column"`` or ``"row"``: ``nn.Linear`` layers and the
            ``Conv1D`` of transformers. The first pattern that fits counts.

    """

    layers: Mapping[str, Column | Row | Literal["column", "row"]]

    def __post_init__(self) -> None:
        for pattern, kind in self.layers.items():
            if not isinstance(kind, Column | Row) and kind not in ("column", "row"):
                raise ValueError(f"`{pattern}: {kind!r}` must be `column`, `row`, `Column(...)` or `Row()`.")

    def kind(self, name: str) -> Column | Row | None:
        """Return how the layer of this name is divided."""
        kind = next((kind for pattern, kind in self.layers.items() if fnmatchcase(name, pattern)), None)
        if isinstance(kind, str):
            return Column() if kind == "column" else Row()
        return kind

    def check(self, module: nn.Module, ranks: int) -> None:
        """Refuse a model that cannot be divided so. Needs no process group.

        Args:
            module: The whole model.
            ranks: Number of ranks to divide it among.

        Raises:
            ValueError: A pattern fits no module, a module is not a linear layer, a size is not a multiple of ``ranks``,
                or a weight to divide is tied to another one.

        """
        names = [name for name, _ in module.named_modules()]
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"`{pattern}` fits no module of `{type(module).__name__}`.")
        uses: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            uses.setdefault(id(parameter), []).append(name)
        for name, layer in module.named_modules():
            if kind := self.kind(name):
                _check_layer(name, layer, kind, around(module, name), ranks)
                if len(tied := uses[id(layer.weight)]) > 1:
                    raise ValueError(f"`{tied[0]}` and `{tied[1]}` are one parameter, which cannot be divided.")


def around(module: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the one of this name."""
    return module.get_submodule(name.rpartition(".")[0])


def can_divide(layer: nn.Module) -> bool:
    """Return whether a layer is one that a plan can divide."""
    return type(layer) is nn.Linear or is_conv1d(layer)


def _check_layer(name: str, layer: Any, kind: Column | Row, holder: nn.Module, ranks: int) -> None:
    if not can_divide(layer):
        raise ValueError(f"`{name}` is a `{type(layer).__name__}`; only `Linear` and `Conv1D` layers can be divided.")
    outputs, inputs = layer.weight.shape[::-1] if is_conv1d(layer) else layer.weight.shape
    if isinstance(kind, Row):
        _check_size(f"{name}: input features", inputs, ranks)
        return
    for attribute in kind.sizes:
        _check_size(f"{attribute} around {name}", _number(name, holder, attribute), ranks)
    unit = _number(name, holder, kind.unit) if kind.unit else 1
    whole, rest = divmod(outputs, kind.parts * unit)
    if rest:
        parts = f"`{kind.parts}` parts of a multiple of `{unit}`"
        raise ValueError(f"`{name}`: `{outputs}` output features are not {parts}.")
    of_what = f" / {kind.parts * unit}" if kind.parts * unit > 1 else ""
    _check_size(f"{name}: output features{of_what}", whole, ranks)


def _number(name: str, holder: nn.Module, attribute: str) -> int:
    value = getattr(holder, attribute, None)
    if not isinstance(value, int):
        raise ValueError(f"`{name}`: the `{type(holder).__name__}` around it has no number `{attribute}`.")
    return value


def _check_size(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(f"`{what}` is `{size}`, not a multiple of the `{ranks}` ranks to divide it among.")
