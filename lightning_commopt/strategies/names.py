"""The words that ``Trainer(strategy=...)`` understands."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_commopt.compression import METHODS
from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["register"]

_LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {"": {}, "_find_unused_parameters_false": {"find_unused_parameters": False}} | {
    "_find_unused_parameters_true": {"find_unused_parameters": True}
}


def register() -> None:
    """Register ``commopt`` and ``commopt_<method>``, each in the launch forms of Lightning's ``ddp``. Idempotent."""
    for method in ("auto", *METHODS):
        stem = "commopt" if method == "auto" else f"commopt_{method}"
        for launch, start_method in _LAUNCHES.items():
            for unused, ddp_arguments in _UNUSED.items():
                options: dict[str, Any] = {"compression": method, "start_method": start_method, **ddp_arguments}
                description = f"Data parallel, compression {method!r}, started by {start_method!r}"
                StrategyRegistry.register(
                    stem + launch + unused, CommOptStrategy, description, override=True, **options
                )
