"""Which stage has which blocks and parameters."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_commopt.pipeline.balance import DoesNotFitError, balance
from lightning_commopt.pipeline.blocks import block_index
from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.memory import Fits
from lightning_commopt.pipeline.trace import Shape, Trace

__all__ = ["Plan", "block_of_parameters", "choose_cuts", "owners_of", "state_owners"]


@dataclass(frozen=True)
class Plan:
    """Where a chain of blocks is cut.

    Args:
        blocks: Names, in the order of their calls.
        cuts: The first block of every stage but the first.

    """

    blocks: tuple[str, ...]
    cuts: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    def stage_of(self, block: int) -> int:
        """Return the stage of a block."""
        return bisect_right(self.cuts, block)

    def first_block(self, stage: int) -> int:
        """Return the first block of a stage."""
        return (0, *self.cuts)[stage]

    def blocks_of(self, stage: int) -> range:
        """Return the blocks of a stage."""
        ends = (*self.cuts, len(self.blocks))
        return range(self.first_block(stage), ends[stage])


def choose_cuts(
    trace: Trace,
    blocks: Sequence[str],
    stages: int,
    chosen: Sequence[int | str] | None,
    costs: Sequence[float],
    fits: Fits | None = None,
) -> Plan:
    """Cut where the user says, or so that the costliest stage is as cheap as can be.

    Args:
        trace: Of a microbatch.
        blocks: Names of the blocks.
        stages: Number of stages.
        chosen: Cuts by hand.
        costs: Of each block.
        fits: Tells whether there is memory for a stage.

    Raises:
        DoesNotFitError: There is not, wherever the model is cut.
        PipelineError: A cut is impossible there, or there are not enough places to cut.

    """
    if chosen is not None:
        cuts = tuple(block_index(blocks, cut) for cut in chosen)
        if len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)):
            raise PipelineError(f"`cuts={list(chosen)}` must be {stages - 1} ascending cuts for {stages} stages.")
        for cut in cuts:
            if cut in trace.uncuttable:
                raise PipelineError(
                    f"There can be no cut before block `{blocks[cut]}`: {trace.uncuttable[cut]}. Cut elsewhere with "
                    "`cuts=[...]`."
                )
        return _fitting(Plan(tuple(blocks), cuts), fits)
    starts = [0, *(i for i in range(1, len(blocks)) if i not in trace.uncuttable)]
    if len(starts) < stages:
        reason = f": {next(iter(trace.uncuttable.values()))}" if trace.uncuttable else ""
        raise PipelineError(
            f"{stages} stages need as many cuts less one, and between the {len(blocks)} blocks there are only "
            f"{len(starts) - 1} places for one{reason}. Take fewer `stages`, or name other `blocks`."
        )
    ends = [*starts[1:], len(blocks)]
    merged = [sum(costs[start:end]) for start, end in zip(starts, ends, strict=True)]
    places = [*starts, len(blocks)]

    def merged_fits(stage: int, first: int, end: int) -> bool:
        return fits is None or fits(stage, places[first], places[end])

    return Plan(tuple(blocks), tuple(starts[part] for part in balance(merged, stages, merged_fits)))


def _fitting(plan: Plan, fits: Fits | None) -> Plan:
    for stage in range(plan.stages):
        own = plan.blocks_of(stage)
        if fits is not None and not fits(stage, own.start, own.stop):
            raise DoesNotFitError(f"Stage {stage} of `cuts={list(plan.cuts)}` is not within its limit.")
    return plan


def block_of_parameters(module: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return the block of each parameter that belongs to one, by every name that it has."""
    place = {id(p): i for i, name in enumerate(blocks) for p in module.get_submodule(name).parameters()}
    return {n: place[id(p)] for n, p in module.named_parameters(remove_duplicate=False) if id(p) in place}


def owners_of(module: nn.Module, plan: Plan, trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the stages that need each parameter, ascending, by every name that it has.

    One that no stage needs belongs to the stage of its block, else to the last one.

    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    owners: dict[str, set[int]] = {}
    for index, block in enumerate(trace.blocks):
        for name in block.used:
            owners.setdefault(name, set()).add(plan.stage_of(index))
    in_blocks = {
        id(p): plan.stage_of(i) for i, name in enumerate(plan.blocks) for p in module.get_submodule(name).parameters()
    }
    result = {}
    for identity, aliases in names.items():
        stages = set().union(*(owners.get(name, set()) for name in aliases))
        if identity in in_blocks:
            stages.add(in_blocks[identity])
        for name in aliases:
            result[name] = tuple(sorted(stages or {plan.stages - 1}))
    return result


def state_owners(
    keys: Sequence[str], plan: Plan, trace: Trace, owners: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Return the stage whose value of each entry of the state dict counts."""
    result = {}
    for key in keys:
        if key in owners:
            result[key] = owners[key][0]
            continue
        block = next((i for i, name in enumerate(plan.blocks) if key.startswith(f"{name}.")), None)
        if block is None:
            block = trace.callers.get(key.rpartition(".")[0], 0)
        result[key] = plan.stage_of(block)
    return result


def costs_of(trace: Trace, parameters: Mapping[str, Shape], in_block: Mapping[str, int]) -> list[float]:
    """Return the cost of each block: floating-point operations, or parameters where none were seen."""
    costs = [float(block.flops) for block in trace.blocks]
    if sum(costs):
        return costs
    costs = [1.0] * len(costs)
    for name, block in in_block.items():
        costs[block] += parameters[name].nbytes
    return costs
