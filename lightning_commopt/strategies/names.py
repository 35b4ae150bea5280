"""The words that ``Trainer(strategy=...)`` understands.

Lightning has no entry point for strategies, and reads the one for callbacks after it checked the strategy's name. So a
name works once ``lightning_commopt`` was imported: by a script, or by LightningCLI, which imports the package of every
class path in its configuration. Until then Lightning says ``You selected an invalid strategy name:
`strategy='commopt'` ``.
"""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_commopt.compression import METHODS
from lightning_commopt.strategies.commopt import CommOptStrategy
from lightning_commopt.strategies.deepspeed import CommOptDeepSpeedStrategy
from lightning_commopt.strategies.other_lightning import refuse_names
from lightning_commopt.strategies.pipeline import CommOptPipelineStrategy
from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = ["register"]

_LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {"": {}, "_find_unused_parameters_false": {"find_unused_parameters": False}} | {
    "_find_unused_parameters_true": {"find_unused_parameters": True}
}


def register() -> None:
    """Register ``commopt``, ``commopt_<method>`` and ``commopt_pipeline``, each in the launch forms of ``ddp``.

    And ``commopt_hsdp`` and ``commopt_hsdp_<method>``, which start processes as Lightning's ``fsdp`` does, and
    ``commopt_deepspeed`` and its stages.
    """
    names = []
    for method in ("auto", *METHODS):
        stem = "commopt" if method == "auto" else f"commopt_{method}"
        for launch, start_method in _LAUNCHES.items():
            for unused, ddp_arguments in _UNUSED.items():
                options: dict[str, Any] = {"compression": method, "start_method": start_method, **ddp_arguments}
                description = f"Data parallel, compression {method!r}, started by {start_method!r}"
                names.append(stem + launch + unused)
                StrategyRegistry.register(names[-1], CommOptStrategy, description, override=True, **options)
    for launch, start_method in _LAUNCHES.items():
        names.append(f"commopt_pipeline{launch}")
        description = f"Pipeline parallel, one stage a process, started by {start_method!r}"
        StrategyRegistry.register(
            names[-1], CommOptPipelineStrategy, description, override=True, start_method=start_method
        )
    for method in ("", *METHODS):
        names.append(f"commopt_hsdp_{method}" if method else "commopt_hsdp")
        chosen: dict[str, Any] = {"compression": method} if method else {}
        description = f"Shards inside nodes (FSDP2), compression {method or 'bf16'!r} between them"
        StrategyRegistry.register(names[-1], CommOptShardedStrategy, description, override=True, **chosen)
    for stage in (None, 1, 2, 3):
        names.append("commopt_deepspeed" if stage is None else f"commopt_deepspeed_stage_{stage}")
        description = f"DeepSpeed ZeRO stage {stage or 2}, with compressed gradient exchange"
        StrategyRegistry.register(names[-1], CommOptDeepSpeedStrategy, description, override=True, stage=stage)
    refuse_names(names)
