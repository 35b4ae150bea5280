"""The options of a pipeline: what is refused, compared between ranks, and said of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.named import schedule_named
from lightning_commopt.pipeline.tensor_parallel import PLANS, TensorParallelPlan

if TYPE_CHECKING:
    from lightning_commopt.strategies.pipeline import CommOptPipelineStrategy

__all__ = ["Activations", "check_pipeline_options", "check_plan", "explain_pipeline", "pipeline_fingerprint"]

Activations = Literal["exact", "bf16"]
"""What activations, and their gradients, are while they travel between stages."""

_COMPARED = (
    "stages",
    "microbatches",
    "schedule",
    "blocks",
    "cuts",
    "stages_per_rank",
    "loss",
    "memory_limit_gb",
    "tensor_parallel",
    "plan",
    "activations",
)


def check_pipeline_options(strategy: "CommOptPipelineStrategy") -> None:
    """Refuse options that are out of bounds, or that a pipeline cannot honour.

    Raises:
        ValueError: Saying what to do instead.

    """
    for name in ("stages", "microbatches", "tensor_parallel"):
        value = getattr(strategy, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}={value!r}` must be an int of at least 1, or None.")
    if strategy.loss not in get_args(Literal["mean", "sum"]):
        raise ValueError(f"`loss={strategy.loss!r}` must be 'mean' or 'sum'.")
    plan, known = strategy.plan, ", ".join(map(repr, PLANS))
    if strategy.tensor_parallel is None or (strategy.tensor_parallel > 1) != (plan is not None):
        raise ValueError(
            f"`tensor_parallel={strategy.tensor_parallel}` with `plan={plan!r}`: to divide matrices among 2 or more "
            f"ranks, say which, with one of {known} or a `TensorParallelPlan`; else leave both out."
        )
    if isinstance(plan, str) and plan not in PLANS:
        raise ValueError(f"`plan={plan!r}` must be one of {known}, or a `TensorParallelPlan`.")
    limit = strategy.memory_limit_gb
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        raise ValueError(f"`memory_limit_gb={limit!r}` must be a number of GB above 0, or None.")
    if strategy.activations not in get_args(Activations):
        words = " or ".join(map(repr, get_args(Activations)))
        raise ValueError(f"`activations={strategy.activations!r}` must be {words}.")
    schedule_named(strategy.schedule, 2, 2, strategy.stages_per_rank)
    if strategy._ddp_kwargs.get("static_graph"):
        raise ValueError(
            "`static_graph` cannot be combined with a pipeline, whose gradients DDP sees once. Leave it out."
        )
    if strategy.hierarchy not in ("auto", False):
        raise ValueError(f"`hierarchy={strategy.hierarchy}` is not available in a pipeline: leave it out.")


def pipeline_fingerprint(strategy: "CommOptPipelineStrategy") -> dict[str, str]:
    """Return the options that must be the same on all ranks."""
    own = {name: str(getattr(strategy, name)) for name in _COMPARED}
    return own | {"different_batches": strategy._batches.policy}


def check_plan(module: nn.Module, blocks: Sequence[str], plan: TensorParallelPlan, ranks: int) -> None:
    """Refuse to divide what cannot be, or what is no part of a block.

    Raises:
        ValueError: Saying what to do instead.

    """
    plan.check(module, ranks)
    for name, _ in module.named_modules():
        if plan.kind(name) is not None and not any(name.startswith(f"{block}.") for block in blocks):
            raise PipelineError(
                f"`plan` divides `{name}`, which is not inside of a block (`{blocks[0]}` to `{blocks[-1]}`): take it "
                "out of the plan."
            )


def explain_pipeline(strategy: "CommOptPipelineStrategy") -> str:
    """Return what is in force in one line."""
    ranks = strategy.ranks_per_pipeline
    replicas = strategy.world_size // strategy.ranks_per_copy
    slices = strategy.tensor_parallel
    divided = f", each stage divided among {slices} ranks," if slices > 1 else ""
    exchange = (
        "one replica"
        if replicas == 1
        else f"{replicas} replicas, whose gradients are exchanged by method `{strategy.compression!r}`"
    )
    return (
        f"commopt: pipeline of {ranks} ranks{divided} under schedule `{strategy.schedule}` with "
        f"{strategy._microbatches} microbatches; {exchange}."
    )
