"""Lightning inside a worker of the pool."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy
from typing_extensions import override


class PoolEnvironment(TorchElasticEnvironment):
    """Rank and world size from the variables that the pool sets; Lightning launches nothing.

    It is never detected: a test passes it, so that a Trainer without it behaves as on the user's machine.
    """

    @staticmethod
    @override
    def detect() -> bool:
        return False


def trainer(world: int, strategy: str | Strategy = "ddp", **options: Any) -> Trainer:
    """A quiet Trainer for all ranks of the run.

    Args:
        world: World size of the run.
        strategy: As for `Trainer`.
        options: Further arguments of `Trainer`; they win over the ones set here. `plugins` is a list.
    """
    plugins = [PoolEnvironment(), *options.pop("plugins", [])]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world // options.get("num_nodes", 1),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, plugins=plugins, **(defaults | options))
