"""Communication-optimised distributed training for PyTorch Lightning.

Importing the package makes its names known to ``lightning.pytorch.Trainer(strategy="commopt")``.
``RayCommOptStrategy`` and ``RayCommOptDeepSpeedStrategy`` are there too, and import Ray when they are asked for.
"""

from typing import TYPE_CHECKING, Any

from lightning_commopt.__about__ import __version__
from lightning_commopt.compression import BF16, FP16, Compression, Int4, Int8, OneBit, PowerSGD, TopK, Uncompressed
from lightning_commopt.failure import RankFailure
from lightning_commopt.measure import CommStats
from lightning_commopt.strategies import (
    CommOptDeepSpeedStrategy,
    CommOptPipelineStrategy,
    CommOptShardedStrategy,
    CommOptStrategy,
    register,
)
from lightning_commopt.tuning import AutoPolicy

if TYPE_CHECKING:
    from lightning_commopt.strategies.ray import RayCommOptDeepSpeedStrategy as RayCommOptDeepSpeedStrategy
    from lightning_commopt.strategies.ray import RayCommOptStrategy as RayCommOptStrategy

register()

__all__ = [
    "BF16",
    "FP16",
    "AutoPolicy",
    "CommOptDeepSpeedStrategy",
    "CommOptPipelineStrategy",
    "CommOptShardedStrategy",
    "CommOptStrategy",
    "CommStats",
    "Compression",
    "Int4",
    "Int8",
    "OneBit",
    "PowerSGD",
    "RankFailure",
    "TopK",
    "Uncompressed",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("RayCommOptStrategy", "RayCommOptDeepSpeedStrategy"):
        from lightning_commopt.strategies import ray

        return getattr(ray, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
