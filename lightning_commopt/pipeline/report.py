"""How a model was cut, as a table, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.memory import held_microbatches
from lightning_commopt.pipeline.plan import Plan
from lightning_commopt.pipeline.simulate import Simulation, StageCost, simulate
from lightning_commopt.pipeline.trace import Shape, Trace

__all__ = ["StageReport", "partition_table", "predicted_bubble", "stage_reports"]


@dataclass(frozen=True)
class StageReport:
    """What one stage has to hold and to do.

    Args:
        stage: Its number.
        rank: Its rank in the pipeline.
        blocks: Names of its first and last block.
        parameters: Number of elements, shared ones counted on each stage.
        state_bytes: Of these, and of gradients and two moments of those that train.
        flops: Of a microbatch's forward.
        activation_bytes: That are held for a microbatch's backward.

    """

    stage: int
    rank: int
    blocks: tuple[str, str]
    parameters: int
    state_bytes: int
    flops: int
    activation_bytes: int


def stage_reports(
    plan: Plan,
    trace: Trace,
    placement: Sequence[int],
    owners: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, Shape],
    identities: Mapping[str, int],
) -> list[StageReport]:
    """Return a report for each stage.

    Args:
        plan: Where the model is cut.
        trace: Of a microbatch.
        placement: The rank of each stage.
        owners: The stages that need each parameter, by name.
        shapes: Of the parameters, by name.
        identities: Tell tied parameters, by name.

    """
    reports = []
    for stage in range(plan.stages):
        blocks = plan.blocks_of(stage)
        own = {identities[name]: shapes[name] for name, stages in owners.items() if stage in stages}
        state = sum(shape.nbytes * (4 if shape.requires_grad else 1) for shape in own.values())
        reports.append(
            StageReport(
                stage,
                placement[stage],
                (plan.blocks[blocks[0]], plan.blocks[blocks[-1]]),
                sum(shape.nbytes // shape.dtype.itemsize for shape in own.values()),
                state,
                sum(trace.blocks[i].flops for i in blocks),
                sum(trace.blocks[i].activation_bytes for i in blocks),
            )
        )
    return reports


def predicted_bubble(schedule: Schedule, flops: Sequence[float]) -> float:
    """Return the fraction of a step in which ranks wait, if time goes with floating-point operations."""
    return _simulated(schedule, flops).bubble


def partition_table(reports: Sequence[StageReport], schedule: Schedule, name: str) -> str:
    """Return the table of stages, and the predicted bubble below."""
    held = held_microbatches(schedule)
    simulated = _simulated(schedule, [float(r.flops) for r in reports])
    head = ("stage", "rank", "blocks", "parameters", "GFLOP", "activations, MB", "memory, MB", "bubble of rank")
    rows = [
        (
            str(r.stage),
            str(r.rank),
            r.blocks[0] if r.blocks[0] == r.blocks[1] else f"{r.blocks[0]} to {r.blocks[1]}",
            f"{r.parameters:,}",
            f"{r.flops / 1e9:.3g}",
            f"{r.activation_bytes / 1e6:.3g}",
            f"{(r.state_bytes + held[r.stage] * r.activation_bytes) / 1e6:.3g}",
            f"{simulated.bubbles[r.rank]:.1%}",
        )
        for r in reports
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    lines.append(
        f"schedule {name} with {schedule.microbatches} microbatches: predicted bubble {simulated.bubble:.1%} of a "
        "step. GFLOP and activations are of one microbatch's forward; memory is that of weights, gradients, two "
        "moments, and the activations that a stage holds at most."
    )
    return "\n".join(["commopt: the model is cut into stages.", *(line.rstrip() for line in lines)])


def _simulated(schedule: Schedule, flops: Sequence[float]) -> Simulation:
    if not sum(flops):
        flops = [1.0] * len(flops)
    return simulate(schedule, [StageCost(cost, 2 * cost, cost) for cost in flops])
