"""What is said when a model was cut."""

from collections.abc import Mapping

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commopt.pipeline.engine import Engine
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
    identities = {name: id(p) for name, p in partition.parameters.items()}
    reports = stage_reports(partition.plan, trace, schedule.placement, owners, partition.shapes, identities)
    rank_zero_info(partition_table(reports, schedule, f"`{options.schedule}`"))
    if options.microbatches < (good := MICROBATCHES_PER_STAGE * ranks):
        flops = [float(report.flops) for report in reports]
        counts = sorted({options.microbatches, 2 * ranks, good, 2 * good})
        choices = ", ".join(f"{m}: {predicted_bubble(options.schedule_of(ranks, m), flops):.0%}" for m in counts)
        rank_zero_warn(
            f"`microbatches={options.microbatches}` is less than {MICROBATCHES_PER_STAGE} a stage, and stages will "
            f"wait. Predicted bubble by microbatches: {choices}."
        )
    weights = sum({identities[name]: shape.nbytes for name, shape in partition.shapes.items()}.values())
    activations = options.microbatches * sum(report.activation_bytes for report in reports)
    _say_if_small(4 * weights + activations, engine.device)


def _say_if_small(needed: int, device: torch.device) -> None:
    """Compare weights, gradients, two moments of each, and all activations with the memory of one device."""
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if needed < 0.8 * total:
        rank_zero_info(
            f"commopt: the whole model would take about {needed / 1e9:.1f} GB of the {total / 1e9:.1f} GB of one "
            "device: data parallel (`strategy='commopt'`) is faster, since no stage waits for another."
        )
