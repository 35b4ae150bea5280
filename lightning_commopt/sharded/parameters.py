"""What FSDP2 shards, as the gradient path sees it."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_commopt.compression import Compression

__all__ = [
    "ShardGroup",
    "ShardGroups",
    "ShardedParameter",
    "begin_alike",
    "send_from_first",
    "sharded_modules",
]


class ShardedParameter:
    """This rank's shard of one parameter, padded as it lies in FSDP2's flat gradients.

    Args:
        name: Of the parameter in the LightningModule.
        managed: What FSDP2 keeps of it.

    """

    def __init__(self, name: str, managed: Any) -> None:
        self.name = name
        self._managed = managed
        self.shape = torch.Size(managed.padded_sharded_param_size)
        self.whole_shape = torch.Size(managed._orig_size)
        self.dtype: torch.dtype = managed.sharded_param.dtype

    def numel(self) -> int:
        """Elements of a shard, padding included."""
        return self.shape.numel()

    @property
    def tensor(self) -> nn.Parameter:
        """What an optimizer has of it."""
        parameter: nn.Parameter = self._managed.sharded_param
        return parameter

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained now."""
        return self.tensor.requires_grad

    @property
    def gathered(self) -> nn.Parameter | None:
        """The whole parameter that steps of the module use; None before it was gathered for the first time."""
        whole: nn.Parameter | None = getattr(self._managed, "_unsharded_param", None)
        return whole

    def flag_to_step(self) -> None:
        """Let the gathered parameter, which a step of the module uses, be trained as the shard is."""
        whole = self.gathered
        if whole is not None and whole.requires_grad != self.requires_grad:
            whole.requires_grad_(self.requires_grad)

    def flag_from_step(self) -> None:
        """Let the shard be trained as the gathered parameter, where a step of the module has it."""
        whole = self.gathered if self._managed.sharded_state.name == "UNSHARDED" else None
        if whole is not None and whole.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(whole.requires_grad)

    def travels_exactly(self, method: Compression) -> bool:
        """Whether the parameter is sent inside a node as it is; float64 is, since payloads are made of fp32."""
        return method.travels_exactly(self.whole_shape) or self.dtype == torch.float64

    @property
    def extended(self) -> bool:
        """Whether it encodes itself for an all-gather."""
        return hasattr(self._managed._sharded_local_tensor, "fsdp_pre_all_gather")

    @property
    def shard_dim(self) -> int:
        """The dimension that is cut."""
        return int(self._managed.fsdp_placement.dim)

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, without padding; None where there is none."""
        gradient = self.tensor.grad
        return gradient._local_tensor if isinstance(gradient, DTensor) else gradient

    def take_grad(self) -> Tensor | None:
        """Return :attr:`grad` and leave None in its place."""
        gradient = self.grad
        self.tensor.grad = None
        return gradient


class ShardGroup:
    """The parameters whose gradients FSDP2 reduces together, in the order in which they lie in its flat buffer.

    Args:
        managed: FSDP2's group.
        parameters: Of it.

    """

    def __init__(self, managed: Any, parameters: list[ShardedParameter]) -> None:
        self.managed = managed
        self.parameters = parameters

    @property
    def trainable(self) -> list[ShardedParameter]:
        """The parameters that are trained now."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def synchronises(self) -> bool:
        """Whether the next backward reduces gradients over shards and replicas, as far as the module was told."""
        return bool(self.managed.reduce_grads and self.managed.all_reduce_grads)


class ShardGroups:
    """All groups of a module that was sharded with ``fully_shard``.

    Args:
        module: The LightningModule.

    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reduces_unused = False
        """Whether FSDP2 reduces parameters without a gradient, as zeros."""
        names = {id(p): name for name, p in module.named_parameters()}
        self.groups = []
        for managed in _managed_groups(module):
            parameters = [ShardedParameter(names[id(p.sharded_param)], p) for p in managed.fsdp_params]
            self.groups.append(ShardGroup(managed, parameters))

    def __iter__(self) -> Iterator[ShardGroup]:
        return iter(self.groups)

    @cached_property
    def parameters(self) -> dict[str, ShardedParameter]:
        """All parameters that are sharded, by name."""
        return {p.name: p for group in self.groups for p in group.parameters}

    @property
    def trainable(self) -> dict[str, ShardedParameter]:
        """Those that are trained now."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def synchronise(self) -> bool:
        """Whether the next backward reduces all gradients."""
        return all(group.synchronises for group in self.groups)

    def reduce_unused(self) -> None:
        """Let parameters without a gradient be reduced as zeros, where this torch can. A collective."""
        for sharded in sharded_modules(self.module):
            if hasattr(sharded, "set_reduce_scatter_unused_params"):
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
                sharded.unshard()  # FSDP2 passes over a group that was never gathered
                sharded.reshard()
                self.reduces_unused = True


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the modules to which ``fully_shard`` was applied."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def send_from_first(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks of a group (None: of the run) the tensor of its first one. A collective."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, group_src=0, group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


def begin_alike(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Give all replicas the parameters of the first, and all ranks the buffers of rank 0. A collective.

    Args:
        module: It is sharded.
        replicas: The ranks with this rank's shard.

    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            send_from_first(parameter.detach().to_local(), replicas)
        else:
            send_from_first(parameter)
    for buffer in module.buffers():
        send_from_first(buffer)


def _managed_groups(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups; several modules may share one."""
    seen: set[int] = set()
    for sharded in sharded_modules(module):
        state: Any = sharded._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12 there may be several
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group
