"""The strategies that a Trainer takes, one class a file."""

from lightning_commopt.strategies.commopt import CommOptStrategy
from lightning_commopt.strategies.deepspeed import CommOptDeepSpeedStrategy
from lightning_commopt.strategies.names import register
from lightning_commopt.strategies.pipeline import CommOptPipelineStrategy
from lightning_commopt.strategies.sharded import CommOptShardedStrategy

__all__ = [
    "CommOptDeepSpeedStrategy",
    "CommOptPipelineStrategy",
    "CommOptShardedStrategy",
    "CommOptStrategy",
    "register",
]
