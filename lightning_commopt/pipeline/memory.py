"""What stages need of memory, and what there is."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.simulate import peak_activations
from lightning_commopt.pipeline.trace import Shape, Trace

__all__ = [
    "BlockMemory",
    "Fits",
    "block_memory",
    "data_parallel_advice",
    "device_bytes",
    "held_microbatches",
    "stage_bytes",
    "within",
]

_TRAINING = 4
"""Weights, gradients and two moments, as Adam and its kin keep."""
_SMALL = 0.8

Fits = Callable[[int, int, int], bool]
"""Tells whether a stage may have the blocks from one to before another."""


class BlockMemory(NamedTuple):
    """What one block needs.

    Args:
        state: Bytes of weights, and of gradients and two moments of those that train.
        activations: Bytes that one microbatch holds for its backward.

    """

    state: int
    activations: int


def block_memory(trace: Trace, shapes: Mapping[str, Shape], in_block: Mapping[str, int]) -> list[BlockMemory]:
    """Return what each block needs; a parameter that several blocks need counts for each.

    Args:
        trace: Of a microbatch.
        shapes: Of all parameters, by name.
        in_block: The block of each parameter that belongs to one, by name.

    """
    names = [set(block.used) for block in trace.blocks]
    for name, index in in_block.items():
        names[index].add(name)
    return [
        BlockMemory(sum(_state(shapes[name]) for name in own), block.activation_bytes)
        for own, block in zip(names, trace.blocks, strict=True)
    ]


def held_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Return how many microbatches each stage holds for their backwards at most, by stage."""
    held = []
    for stage, rank in enumerate(schedule.placement):
        sizes = [float(other == stage) for other in range(schedule.stages)]
        held.append(int(peak_activations(schedule, sizes)[rank]))
    return tuple(held)


def stage_bytes(blocks: Sequence[BlockMemory], held: int) -> int:
    """Return what a stage of some blocks needs, holding so many microbatches."""
    return sum(block.state + held * block.activations for block in blocks)


def within(limit: float, schedule: Schedule, blocks: Sequence[BlockMemory]) -> Fits:
    """Return what tells whether a stage keeps a limit on the bytes of a rank, which its stages share evenly."""
    held = held_microbatches(schedule)
    share = limit * schedule.ranks / schedule.stages
    return lambda stage, first, end: stage_bytes(blocks[first:end], held[stage]) <= share


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, or of this machine; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        with open("/proc/meminfo") as table:
            return next(int(line.split()[1]) * 1024 for line in table if line.startswith("MemTotal:"))
    except (OSError, StopIteration):
        return None


def data_parallel_advice(needed: float, memory: int | None, copies: int) -> str:
    """Return a recommendation where no pipeline is needed, else an empty text.

    Args:
        needed: Bytes of one whole copy of the model in training, with activations.
        memory: Bytes of one device, or of the machine.
        copies: How many copies data parallel would put into that memory: one on a GPU, one a process on a machine.

    """
    if memory is None or needed * copies >= _SMALL * memory:
        return ""
    whose = "one device" if copies == 1 else f"this machine, for each of {copies} processes"
    return (
        f"the whole model would take about {needed / 1e9:.1f} GB of the {memory / 1e9:.1f} GB of {whose}: data "
        "parallel (`strategy='commopt'`) is faster, since no stage waits for another."
    )


def _state(shape: Shape) -> int:
    return shape.nbytes * (_TRAINING if shape.requires_grad else 1)
