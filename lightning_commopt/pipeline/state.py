"""State of a whole model from the stages that have it, one entry at a time, on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_commopt.routes import ControlGroup

__all__ = ["OptimizerNames", "broadcast_tensor", "stream"]

T = TypeVar("T")


def stream(
    keys: Sequence[str], owner_of: Callable[[str], int], value_of: Callable[[str], T], control: ControlGroup
) -> dict[str, T]:
    """Collect entries on the first rank of a pipeline; elsewhere none is held longer than it takes to send it.

    Args:
        keys: Of all entries, the same on all ranks.
        owner_of: Tells the place of the rank that has an entry.
        value_of: Gives an entry that this rank has.
        control: The ranks of the pipeline.

    Returns:
        All entries, on the CPU, in the order of the keys; none on other ranks than the first.

    """
    collected = {}
    for key in keys:
        owner = owner_of(key)
        if owner == control.rank == 0:
            collected[key] = _on_cpu(value_of(key))
        elif owner == control.rank:
            dist.send_object_list([_on_cpu(value_of(key))], group=control.group, group_dst=0)
        elif control.rank == 0:
            box: list[Any] = [None]
            dist.recv_object_list(box, group=control.group, group_src=owner)
            collected[key] = box[0]
    return collected


def broadcast_tensor(
    mine: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int, control: ControlGroup
) -> Tensor:
    """Return a tensor of one rank on the CPU of all ranks of a pipeline.

    Args:
        mine: On the owner.
        shape: Of the tensor.
        dtype: Of the tensor.
        owner: Its place.
        control: The ranks of the pipeline.

    """
    value = torch.empty(tuple(shape), dtype=dtype) if mine is None else mine.detach().cpu().contiguous()
    dist.broadcast(value, group=control.group, group_src=owner)
    return value


class OptimizerNames:
    """The parameters of an optimizer by name, of which each stage keeps its own.

    Args:
        optimizer: Over the whole model.
        names: Of parameters, by identity.

    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = dict(names)
        self._groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._places: Mapping[str, tuple[int, ...]] = {}

    @property
    def is_staged(self) -> bool:
        """Whether parameters of other stages were let go of."""
        return bool(self._places)

    def keep(self, identities: set[int], places: Mapping[str, tuple[int, ...]]) -> None:
        """Let go of all parameters but some, and of their state.

        Args:
            identities: Of the parameters that stay.
            places: The ranks of the pipeline that hold each parameter, by name.

        """
        self._places = dict(places)
        for group in self._optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) in identities]
        for parameter in list(self._optimizer.state):
            if id(parameter) not in identities:
                del self._optimizer.state[parameter]

    def state_dict(self, control: ControlGroup) -> dict[str, Any]:
        """Return the state dict of the whole optimizer on the first rank of the pipeline, and nothing elsewhere."""
        own = {self._names[id(p)]: state for p, state in self._optimizer.state.items()}
        names = [name for group in self._groups for name in group]
        known = {name for names_here in control.all_gather(list(own)) for name in names_here}
        wanted = [name for name in names if name in known]
        collected = stream(wanted, lambda name: self._places[name][0], lambda name: own[name], control)
        if control.rank != 0:
            return {}
        places = {name: place for place, name in enumerate(names)}
        groups = []
        local = self._optimizer.state_dict()["param_groups"]
        for group, members in zip(local, self._groups, strict=True):
            groups.append({**group, "params": [places[name] for name in members]})
        return {"state": {places[name]: state for name, state in collected.items()}, "param_groups": groups}


def _on_cpu(value: T) -> T:
    def moved(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    result: T = tree_map(moved, value)
    return result
