"""The options of a pipeline: what is refused, compared between ranks, and said of them."""

from typing import TYPE_CHECKING, Literal, get_args

from lightning_commopt.pipeline.named import schedule_named

if TYPE_CHECKING:
    from lightning_commopt.strategies.pipeline import CommOptPipelineStrategy

__all__ = ["check_pipeline_options", "explain_pipeline", "pipeline_fingerprint"]

_COMPARED = ("stages", "microbatches", "schedule", "blocks", "cuts", "stages_per_rank", "loss", "memory_limit_gb")


def check_pipeline_options(strategy: "CommOptPipelineStrategy") -> None:
    """Refuse options that are out of bounds, or that a pipeline cannot honour.

    Raises:
        ValueError: Saying what to do instead.

    """
    for name in ("stages", "microbatches"):
        value = getattr(strategy, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}={value!r}` must be an int of at least 1, or None.")
    if strategy.loss not in get_args(Literal["mean", "sum"]):
        raise ValueError(f"`loss={strategy.loss!r}` must be 'mean' or 'sum'.")
    limit = strategy.memory_limit_gb
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        raise ValueError(f"`memory_limit_gb={limit!r}` must be a number of GB above 0, or None.")
    schedule_named(strategy.schedule, 2, 2, strategy.stages_per_rank)
    if strategy._ddp_kwargs.get("static_graph"):
        raise ValueError(
            "`static_graph` cannot be combined with a pipeline, whose gradients DDP sees once. Leave it out."
        )
    if strategy.hierarchy not in ("auto", False):
        raise ValueError(f"`hierarchy={strategy.hierarchy}` is not available in a pipeline: leave it out.")
    if strategy._uneven.policy == "join":
        raise ValueError("`uneven='join'` is not available in a pipeline: choose 'error' or 'trim'.")


def pipeline_fingerprint(strategy: "CommOptPipelineStrategy") -> dict[str, str]:
    """Return the options that must be the same on all ranks."""
    own = {name: str(getattr(strategy, name)) for name in _COMPARED}
    return own | {"different_batches": strategy._batches.policy}


def explain_pipeline(strategy: "CommOptPipelineStrategy") -> str:
    """Return what is in force in one line."""
    ranks = strategy.ranks_per_pipeline
    replicas = strategy.world_size // ranks
    exchange = (
        "one replica"
        if replicas == 1
        else f"{replicas} replicas, whose gradients are exchanged by method `{strategy.compression!r}`"
    )
    return (
        f"commopt: pipeline of {ranks} ranks under schedule `{strategy.schedule}` with {strategy._microbatches} "
        f"microbatches; {exchange}."
    )
