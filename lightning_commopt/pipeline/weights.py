"""The same weights on all ranks: before the first step, and after the last."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt.pipeline.engine import Engine
from lightning_commopt.pipeline.groups import PipelineGroups
from lightning_commopt.pipeline.state import broadcast_tensor

__all__ = ["align", "collect", "part"]


def align(engine: Engine, groups: PipelineGroups) -> None:
    """Start from the same values: those of rank 0 outside of blocks, those of the first replica in them. A collective.

    Args:
        engine: Whose model was just cut; foreign parameters are empty.
        groups: The process groups.

    """
    assert engine.partition is not None
    module = engine.module
    blocks = [module.get_submodule(name) for name in engine.partition.plan.blocks]
    inside = {id(t) for block in blocks for t in (*block.parameters(), *block.buffers())}
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    with torch.no_grad():
        for identity, tensor in tensors.items():
            if not tensor.numel() or tensor.is_meta:
                continue
            if identity not in inside:
                dist.broadcast(tensor.data, 0)
                continue
            if groups.replicas > 1:
                dist.broadcast(tensor.data, group=groups.data, group_src=0)
            if groups.tensor is not None:
                dist.broadcast(tensor.data, group=groups.tensor, group_src=0)


def collect(engine: Engine, groups: PipelineGroups, *, alone: bool) -> None:
    """Put the model together, with all its weights on the CPU of every rank. A collective.

    Args:
        engine: Whose model is in stages.
        groups: The process groups.
        alone: Whether other ranks cannot be asked; what they have becomes NaN.

    """
    partition, module, control = engine.partition, engine.module, groups.control
    assert partition is not None
    owners = engine.state_owners()
    state = module.state_dict()

    def value_of(name: str, parameter: nn.Parameter) -> Tensor:
        shape = partition.shapes[name]
        if alone:
            lost = torch.full((), float("nan"), dtype=shape.dtype).expand(shape.shape)
            return parameter.data if parameter.numel() else lost
        owner = engine.placement[partition.plan_stage(name)]
        mine = parameter.data if owner == groups.place else None
        return broadcast_tensor(mine, shape.shape, shape.dtype, owner, control)

    engine.restore(value_of)
    if alone:
        return
    buffers = dict(module.named_buffers())
    for key in (key for key in partition.state_keys if key in buffers):
        owner, buffer = engine.placement[owners[key]], buffers[key]
        mine = state[key] if owner == groups.place else None
        buffer.data = broadcast_tensor(mine, buffer.shape, buffer.dtype, owner, control)


def part(engine: Engine) -> None:
    """Put the model together, with this rank's weights on the CPU, and all others on the meta device.

    Args:
        engine: Whose model is in stages.

    """
    partition = engine.partition
    assert partition is not None

    def value_of(name: str, parameter: nn.Parameter) -> Tensor:
        shape = partition.shapes[name]
        if parameter.is_meta:
            return torch.empty(shape.shape, dtype=shape.dtype, device="meta")
        return parameter.data.cpu()

    engine.restore(value_of)
    for name, buffer in engine.module.named_buffers():
        if not buffer.is_meta:
            path, _, key = name.rpartition(".")
            engine.module.get_submodule(path)._buffers[key] = buffer.cpu()
