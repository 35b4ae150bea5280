"""What a rank keeps in memory."""

from dataclasses import dataclass, fields
from math import ceil

from lightning_commopt.compression import Compression, Uncompressed
from lightning_commopt.pipeline.memory import held_microbatches
from lightning_commopt.pipeline.schedules import one_f_one_b
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import Layout

__all__ = ["Memory", "activation_bytes", "memory", "residual_numel"]

_DDP_BUCKET_NUMEL = 25 * 2**20 // 4
_DEEPSPEED_BUCKET_NUMEL = 200_000_000  # Lightning's default, of all-gathers and of reductions
_AHEAD = 2  # blocks whose parameters are gathered at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the one that has most.

    Args:
        parameters: As the model uses them.
        gradients: Of them.
        masters: fp32 copies that the optimizer updates.
        optimizer: Its moments.
        activations: What forward keeps for backward.
        buckets: Gradients and parameters on their way, and casts of parameters.
        method: Residuals and other state of compression.

    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float = 0.0
    buckets: float = 0.0
    method: float = 0.0

    @property
    def states(self) -> float:
        """Parameters, gradients, masters and moments: what the ZeRO paper calls model states."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def memory(
    model: Model,
    training: Training,
    layout: Layout,
    samples: float,
    passes: int,
    method: Compression,
    ranks_per_node: int = 1,
) -> Memory:
    """Return what a rank needs.

    Args:
        model: To be trained.
        training: How.
        layout: How ranks divide it.
        samples: That a rank works on at a time, a microbatch.
        passes: Microbatches of a step.
        method: Of compression.
        ranks_per_node: Ranks that share every bucket; 1 where the exchange is flat.

    """
    states = _states(model, training, layout)
    return Memory(
        *states,
        activations=_held_activations(model, training, layout, samples, passes),
        buckets=_buckets(model, training, layout),
        method=_method(model, training, layout, method, ranks_per_node),
    )


def _states(model: Model, training: Training, layout: Layout) -> tuple[float, float, float, float]:
    """Return parameters, gradients, masters, moments."""
    own = model.params * layout.largest_part(model.layers)
    if layout.kind != "zero":
        size = training.weight_size
        sizes = (size, size, 0, training.moments * size)
        return tuple(own * each / layout.shards for each in sizes)  # type: ignore[return-value]
    size = training.activation_size
    master = 0 if size == 4 else 4
    by = [layout.shards if layout.stage >= stage else 1 for stage in (3, 2, 1, 1)]
    second_copy = size / layout.hpz if layout.hpz > 1 else 0
    sizes = (size, size, master, 4 * training.moments)
    parameters, *others = (own * each / shards for each, shards in zip(sizes, by, strict=True))
    return (parameters + own * second_copy, *others)  # type: ignore[return-value]


def activation_bytes(model: Model, training: Training, tensor: int = 1) -> float:
    """Return what one block keeps of one sample.

    Korthikanti et al. (arXiv 2205.05198), equations 1 and 2, for two bytes a number and masks of one:
    ``s h (10 + 24/t + 5 a s / (h t))``; with every block computed again, its input alone: ``2 s h``.

    Args:
        model: Its shape.
        training: Precision, checkpointing, attention.
        tensor: Ranks that divide its matrices.

    """
    wide = training.activation_size / 2
    if training.checkpointing:
        return 2 * wide * model.sequence * model.hidden
    return wide * _inside(model, training, tensor)


def _inside(model: Model, training: Training, tensor: int) -> float:
    scores = 5 * model.heads * model.sequence / model.hidden if training.attention == "stored" else 0.0
    return model.sequence * model.hidden * (10 + (24 + scores) / tensor)


def _held_activations(model: Model, training: Training, layout: Layout, samples: float, passes: int) -> float:
    """On the stage that holds most; the last one has the output layer's."""
    if training.activation_bytes is not None:
        of_copy = training.activation_bytes * samples * min(layout.stages, passes)
        return of_copy * layout.largest_part(model.layers)
    layers = max(layout.blocks_of(model.layers))
    block = activation_bytes(model, training, layout.tensor) * samples
    again = (
        training.activation_size / 2 * _inside(model, training, layout.tensor) * samples
        if training.checkpointing
        else 0
    )
    held = held_microbatches(one_f_one_b(layout.stages, passes)) if layout.stages > 1 else (1,)
    by_stage = [count * layers * block + again for count in held]
    output = 4 * samples * model.sequence * model.vocabulary + 4 * samples * model.sequence * model.hidden
    by_stage[-1] += output
    return max(by_stage)


def _buckets(model: Model, training: Training, layout: Layout) -> float:
    """What is on its way, or cast for the time of a pass."""
    own = model.params * layout.largest_part(model.layers)
    layer = min(model.layer_params, own)
    casts = 2 * own if training.precision.endswith("mixed") else 0  # autocast keeps them until the pass is over
    if layout.kind == "hsdp":
        return _AHEAD * layer * training.activation_size + layer * 4
    if layout.kind == "zero":
        bucket = min(_DEEPSPEED_BUCKET_NUMEL, own) * training.activation_size
        return 2 * bucket + (bucket if layout.stage < 3 else _AHEAD * layer * training.activation_size)
    if layout.replicas == 1:
        return casts
    return casts + own * training.weight_size  # DDP's buckets are a second copy of the gradients


def residual_numel(model: Model, layout: Layout, per_node: int) -> float:
    """Return the elements for which a rank keeps residuals.

    Args:
        model: To be trained.
        layout: How ranks divide it.
        per_node: Ranks that share every bucket; 1 where the exchange is flat.

    """
    if layout.kind == "zero":
        return float(model.params)  # every rank's own, which ZeRO does not shard
    sharing = layout.shards if layout.kind == "hsdp" else per_node
    return model.params * layout.largest_part(model.layers) / sharing


def _method(model: Model, training: Training, layout: Layout, method: Compression, per_node: int) -> float:
    if isinstance(method, Uncompressed) or layout.replicas == 1:
        return 0.0
    numel = ceil(residual_numel(model, layout, per_node))
    bits = getattr(method, "bits", 32)
    if layout.kind == "zero" and bits >= 8:
        return 0.0  # its default there
    state = method.memory_bytes(numel)
    if method.error_feedback and not method.summable and layout.replicas > 2:
        state += 4 * numel // layout.replicas
    shadow = 2 if training.precision == "16-mixed" and layout.kind != "zero" else 1  # a step may be skipped
    return state * shadow + method.wire_bytes(min(numel, _DDP_BUCKET_NUMEL)) * 4
