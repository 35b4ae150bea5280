"""How a model was cut, as a table, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.plan import Plan
from lightning_commopt.pipeline.simulate import StageCost, peak_activations, simulate
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
        parameter_bytes: Their bytes.
        flops: Of a microbatch's forward.
        activation_bytes: That are held for a microbatch's backward.

    """

    stage: int
    rank: int
    blocks: tuple[str, str]
    parameters: int
    parameter_bytes: int
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
        nbytes = sum(shape.nbytes for shape in own.values())
        reports.append(
            StageReport(
                stage,
                placement[stage],
                (plan.blocks[blocks[0]], plan.blocks[blocks[-1]]),
                sum(shape.nbytes // shape.dtype.itemsize for shape in own.values()),
                nbytes,
                sum(trace.blocks[i].flops for i in blocks),
                sum(trace.blocks[i].activation_bytes for i in blocks),
            )
        )
    return reports


def predicted_bubble(schedule: Schedule, flops: Sequence[float]) -> float:
    """Return the fraction of a step in which ranks wait, if time goes with floating-point operations."""
    if not sum(flops):
        flops = [1.0] * len(flops)
    return simulate(schedule, [StageCost(cost, 2 * cost, cost) for cost in flops]).bubble


def partition_table(reports: Sequence[StageReport], schedule: Schedule, name: str) -> str:
    """Return the table of stages, and the predicted bubble below."""
    held = peak_activations(schedule, [float(r.activation_bytes) for r in reports])
    head = ("stage", "rank", "blocks", "parameters", "GFLOP", "activations, MB")
    rows = [
        (
            str(r.stage),
            str(r.rank),
            r.blocks[0] if r.blocks[0] == r.blocks[1] else f"{r.blocks[0]} to {r.blocks[1]}",
            f"{r.parameters:,}",
            f"{r.flops / 1e9:.3g}",
            f"{r.activation_bytes / 1e6:.3g}",
        )
        for r in reports
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    bubble = predicted_bubble(schedule, [float(r.flops) for r in reports])
    lines.append(
        f"schedule {name} with {schedule.microbatches} microbatches: predicted bubble {bubble:.1%} of a step; at most "
        f"{max(held) / 1e6:.3g} MB of activations on a rank. GFLOP and MB are of one microbatch's forward."
    )
    return "\n".join(["commopt: the model is cut into stages.", *(line.rstrip() for line in lines)])
