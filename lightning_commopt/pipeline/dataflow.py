"""Which blocks and parameters a tensor depends on, seen at the level of torch functions."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from typing_extensions import override

__all__ = ["Dataflow"]

_NOTHING: frozenset[str] = frozenset()


class Dataflow(TorchFunctionMode):
    """Follows tensors from blocks to blocks, and parameters to the blocks that need them.

    A tensor that depends on a block has the *origin* in which it was made. One that does not is computed anew by every
    stage; it has the parameters that it takes.

    Attributes:
        used: Parameters that each block, with what follows it, depends on.
        skips: Origin, block, and where in it a tensor was used that no block handed over.

    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, set[str]] = {}
        self.skips: list[tuple[int, int, str]] = []
        self._block = 0
        self._inside = False
        self._origins: dict[int, int] = {}
        self._needs: dict[int, frozenset[str]] = {}
        self._parameters: dict[int, str] = {}
        self._kept: list[Any] = []  # an identity is unique while its object lives

    def name(self, tensors: Mapping[str, Tensor], parameters: Iterable[str]) -> None:
        """Tell the names of parameters; a tied one has its first."""
        for name in parameters:
            tensor = tensors[name]
            self._parameters.setdefault(id(tensor), name)
            self._needs[id(tensor)] = frozenset([self._parameters[id(tensor)]])
            self._kept.append(tensor)

    def enter(self, block: int) -> None:
        """A block begins."""
        self._block, self._inside = block, True

    def leave(self) -> None:
        """A block ends."""
        self._inside = False

    def origin_of(self, tensor: Tensor) -> int | None:
        """Return the block that a tensor was made in or after, None if it depends on none."""
        if (known := self._origins.get(id(tensor))) is not None:
            return known
        if id(tensor) in self._needs or tensor.grad_fn is None:
            return None
        return self._from_graph(tensor)

    def parameters_of(self, values: Iterable[Any]) -> set[str]:
        """Return the parameters that values take which no block made."""
        return {name for v in values if isinstance(v, Tensor) and self.origin_of(v) is None for name in self._need(v)}

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether it is a parameter."""
        return id(tensor) in self._parameters

    def made_by_block(self, tensor: Tensor) -> None:
        """Note that the running block returned a tensor."""
        self._mark(tensor, self._block)

    def replaced(self, tensor: Tensor) -> Tensor:
        """Return what stands for a tensor on the other side of a cut; it may be changed in place."""
        with torch._C.DisableTorchFunction():
            leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            inner = leaf.clone()
        self._mark(leaf, self._block)
        self._mark(inner, self._block)
        return inner

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            changed = inputs[:1]
            results += changed + [t._base for t in changed if t._base is not None]
        if results:
            self._operation(inputs, results)
        return result

    def _operation(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        origins = [origin for t in inputs if (origin := self.origin_of(t)) is not None]
        needs = _NOTHING.union(*(self._need(t) for t in inputs if self.origin_of(t) is None))
        for origin in origins:
            if origin < self._block:
                where = "inside" if self._inside else "after the end"
                self.skips.append((origin, self._block, where))
        if origins or self._inside:
            self.used.setdefault(self._block, set()).update(needs)
        for tensor in results:
            if id(tensor) in self._parameters:
                continue
            if origins:
                self._mark(tensor, self._block)
            elif id(tensor) not in self._origins:
                self._needs[id(tensor)] = needs
                self._kept.append(tensor)

    def _need(self, tensor: Tensor) -> frozenset[str]:
        return self._needs.get(id(tensor), _NOTHING)

    def _mark(self, tensor: Tensor, origin: int) -> None:
        self._origins[id(tensor)] = origin
        self._kept.append(tensor)

    def _from_graph(self, tensor: Tensor) -> int | None:
        """Find what a tensor depends on that came out of a function which is opaque here, such as a custom one."""
        origin: int | None = None
        names: set[str] = set()
        seen: set[Any] = set()
        todo: list[Any] = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) in self._origins:
                origin = max(origin or 0, self._origins[id(leaf)])
            elif leaf is not None:
                names |= self._need(leaf)
            todo += [following for following, _ in node.next_functions]
        if origin is not None:
            self._mark(tensor, origin)
        else:
            self._needs[id(tensor)] = frozenset(names)
            self._kept.append(tensor)
        return origin
