"""State of a whole model from the stages that have it, one entry at a time, on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_commopt.pipeline.groups import PipelineGroups
from lightning_commopt.pipeline.tensor_parallel import TensorParallel
from lightning_commopt.routes import ControlGroup

__all__ = ["OptimizerNames", "ScatteredState", "broadcast_tensor", "stream"]

T = TypeVar("T")


def stream(
    keys: Sequence[str],
    owner_of: Callable[[str], int],
    value_of: Callable[[str], T],
    control: ControlGroup,
    *,
    speaks: bool = True,
) -> dict[str, T]:
    """Collect entries on the first rank of a pipeline; elsewhere none is held longer than it takes to send it.

    Args:
        keys: Of all entries, the same on all ranks.
        owner_of: Tells the place of the rank that has an entry.
        value_of: Gives an entry that this rank has. It is called once for each, in the order of the keys.
        control: The ranks of the pipeline.
        speaks: Whether entries are sent; else another pipeline of the same replica sends them, and ``value_of`` takes
            part in what its ranks do together.

    Returns:
        All entries, on the CPU, in the order of the keys; none on other ranks than the first.

    """
    collected: dict[str, T] = {}
    for key in keys:
        owner = owner_of(key)
        value: Any = value_of(key) if owner == control.rank else None
        if not speaks:
            continue
        if owner == control.rank == 0:
            collected[key] = _on_cpu(value)
        elif owner == control.rank:
            dist.send_object_list([_on_cpu(value)], group=control.group, group_dst=0)
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


@dataclass(frozen=True)
class ScatteredState:
    """The state of a module whose entries are on several ranks.

    Args:
        module: On each rank, with its entries.
        keys: Of all entries.
        places: The rank of the pipeline that has an entry, by key.
        cuts: The first block of every stage but the first.
        groups: The process groups.
        tensor: What divided matrices, until it has put them together.

    """

    module: nn.Module
    keys: tuple[str, ...]
    places: Mapping[str, int]
    cuts: tuple[int, ...]
    groups: PipelineGroups
    tensor: TensorParallel | None

    def state_dict(self) -> dict[str, Any]:
        """Return all entries on the first rank of the replica, and nothing elsewhere. A collective."""
        state, groups = self.module.state_dict(), self.groups
        return stream(
            self.keys,
            self.places.__getitem__,
            lambda key: _whole(self.tensor, key, state[key]),
            groups.control,
            speaks=groups.slice == 0,
        )


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
        self._tensor: TensorParallel | None = None

    @property
    def is_staged(self) -> bool:
        """Whether parameters of other stages were let go of."""
        return bool(self._places)

    def keep(
        self, identities: set[int], places: Mapping[str, tuple[int, ...]], tensor: TensorParallel | None = None
    ) -> None:
        """Let go of all parameters but some, and of their state.

        Args:
            identities: Of the parameters that stay.
            places: The ranks of the pipeline that hold each parameter, by name.
            tensor: What divides matrices.

        """
        self._places, self._tensor = dict(places), tensor
        for group in self._optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) in identities]
        for parameter in list(self._optimizer.state):
            if id(parameter) not in identities:
                del self._optimizer.state[parameter]

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take the state of this rank's parameters from a state dict of the whole optimizer; options stay."""
        places = {name: place for place, name in enumerate(name for group in self._groups for name in group)}
        own = [self._names[id(p)] for group in self._optimizer.param_groups for p in group["params"]]
        state = {i: self._part(n, saved["state"][places[n]]) for i, n in enumerate(own) if places[n] in saved["state"]}
        groups, kept = self._optimizer.state_dict()["param_groups"], self._optimizer.param_groups
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._optimizer.param_groups = kept  # others may hold on to these

    def unshard(self) -> None:
        """Make the state of divided matrices whole, before they are. A collective."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for key, value in state.items():
                    state[key] = _whole(self._tensor, self._names[id(parameter)], value)
        self._tensor = None

    def _part(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._tensor is None:
            return dict(state)
        tensor = self._tensor
        return {k: tensor.local(name, v) if isinstance(v, Tensor) else v for k, v in state.items()}

    def state_dict(self, groups: PipelineGroups) -> dict[str, Any]:
        """Return the state dict of the whole optimizer on the first rank of the replica, and nothing elsewhere."""
        control = groups.control
        own = {self._names[id(p)]: state for p, state in self._optimizer.state.items()}
        names = [name for group in self._groups for name in group]
        known = {name for names_here in control.all_gather(list(own)) for name in names_here}
        wanted = [name for name in names if name in known]

        def whole(name: str) -> dict[str, Any]:
            return {key: _whole(self._tensor, name, value) for key, value in own[name].items()}

        speaks = groups.slice == 0
        collected = stream(wanted, lambda name: self._places[name][0], whole, control, speaks=speaks)
        if control.rank != 0 or not speaks:
            return {}
        places = {name: place for place, name in enumerate(names)}
        merged = []
        local = self._optimizer.state_dict()["param_groups"]
        for group, members in zip(local, self._groups, strict=True):
            merged.append({**group, "params": [places[name] for name in members]})
        return {"state": {places[name]: state for name, state in collected.items()}, "param_groups": merged}


def _whole(tensor: TensorParallel | None, name: str, value: Any) -> Any:
    return tensor.full(name, value) if tensor is not None and isinstance(value, Tensor) else value


def _on_cpu(value: T) -> T:
    def moved(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    result: T = tree_map(moved, value)
    return result
