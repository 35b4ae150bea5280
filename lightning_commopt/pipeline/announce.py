"""What is said when a model was cut."""

import os
from collections.abc import Mapping

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commopt.pipeline.engine import Engine
from lightning_commopt.pipeline.memory import data_parallel_advice, device_bytes
from lightning_commopt.pipeline.report import partition_table, predicted_bubble, stage_reports

__all__ = ["MICROBATCHES_PER_STAGE", "announce"]

MICROBATCHES_PER_STAGE = 4
"""With so many, a pipeline of equal stages waits for about a fifth of a step."""


def announce(engine: Engine, owners: Mapping[str, tuple[int, ...]]) -> None:
    """Print the stages, warn of few microbatches, and say when one device would do.

    Args:
        engine: Whose model was cut.
        owners: The stages that need each parameter, by name.

    """
    partition, trace, options, ranks = engine.partition, engine.first_trace, engine.options, engine.ranks
    assert partition is not None
    assert trace is not None
    schedule = options.schedule_of(ranks, options.microbatches)
    shapes = partition.shapes
    identities = {name: id(p) for name, p in partition.parameters.items()}
    reports = stage_reports(partition.plan, trace, schedule.placement, owners, shapes, identities)
    rank_zero_info(partition_table(reports, schedule, f"`{options.schedule}`"))
    if options.microbatches < (good := MICROBATCHES_PER_STAGE * ranks):
        flops = [float(report.flops) for report in reports]
        counts = sorted({options.microbatches, 2 * ranks, good, 2 * good})
        choices = ", ".join(f"{m}: {predicted_bubble(options.schedule_of(ranks, m), flops):.0%}" for m in counts)
        rank_zero_warn(
            f"`microbatches={options.microbatches}` is less than {MICROBATCHES_PER_STAGE} a stage, and stages will "
            f"wait. Predicted bubble by microbatches: {choices}."
        )
    held = options.microbatches * sum(report.activation_bytes for report in reports)
    state = {identities[name]: shape.nbytes * (4 if shape.requires_grad else 1) for name, shape in shapes.items()}
    copies = 1 if engine.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if advice := data_parallel_advice(sum(state.values()) + held, device_bytes(engine.device), copies):
        rank_zero_info(f"commopt: {advice}")
