"""The word for a strategy that a user made as an object."""

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from lightning_commopt.compression import METHODS
from lightning_commopt.strategies import (
    CommOptDeepSpeedStrategy,
    CommOptPipelineStrategy,
    CommOptShardedStrategy,
    CommOptStrategy,
)

__all__ = ["name_of"]

_LAUNCHES = {"popen": "", "spawn": "_spawn", "fork": "_fork"}


def name_of(strategy: object) -> str | None:
    """Return the name under which ``Trainer(strategy=...)`` makes a strategy of the same class.

    Method, ZeRO stage, launcher and ``find_unused_parameters`` are those of the object; names have no other options.

    Args:
        strategy: The user's.

    Returns:
        None where no name makes its class.

    """
    kind = type(strategy)
    if isinstance(strategy, DDPStrategy) and kind in (DDPStrategy, CommOptStrategy):
        stem = "ddp"
        if isinstance(strategy, CommOptStrategy):
            stem = "commopt" if strategy._is_auto else _with_method("commopt", strategy.compression.name)
        unused = "_find_unused_parameters_true" if strategy._ddp_kwargs.get("find_unused_parameters") else ""
        return stem + _LAUNCHES.get(strategy._start_method, "") + unused
    if isinstance(strategy, CommOptPipelineStrategy) and kind is CommOptPipelineStrategy:
        return "commopt_pipeline" + _LAUNCHES.get(strategy._start_method, "")
    if isinstance(strategy, CommOptShardedStrategy) and kind is CommOptShardedStrategy:
        return _with_method("commopt_hsdp", strategy.compression.name)
    if isinstance(strategy, DeepSpeedStrategy) and kind in (DeepSpeedStrategy, CommOptDeepSpeedStrategy):
        stem = "commopt_deepspeed" if kind is CommOptDeepSpeedStrategy else "deepspeed"
        stage = (strategy.config or {}).get("zero_optimization", {}).get("stage")
        return f"{stem}_stage_{stage}" if stage in (1, 2, 3) else None
    return "fsdp" if kind is FSDPStrategy else None


def _with_method(stem: str, method: str) -> str:
    return f"{stem}_{method}" if method in METHODS else stem
