"""Residuals of a whole model from the stages of a pipeline, as one data-parallel rank would have them."""

from collections.abc import Mapping
from typing import Any

from lightning_commopt.compression import Compression
from lightning_commopt.compression.pending import Parts
from lightning_commopt.routes import ControlGroup, GradientPath

__all__ = ["MergedPath", "StagePath"]


class MergedPath:
    """The exchanges of all stages together, to be saved by the first rank of a pipeline. Making one is a collective.

    Args:
        path: Of this rank's stages.
        control: The ranks of the pipeline.

    """

    def __init__(self, path: GradientPath, control: ControlGroup) -> None:
        self.method: Compression = path.method
        self.world, self.shards = path.world, path.shards
        self.rounds, self.applied_steps = path.rounds, path.applied_steps
        self._state: dict[str, Parts] = {}
        for state in reversed(control.gather(path.state()) or []):  # of a shared parameter, the first stage's counts
            for kind, parts in state.items():
                self._state.setdefault(kind, {}).update(parts)

    def state(self) -> dict[str, Parts]:
        """Return the state of all stages."""
        return self._state


class StagePath:
    """An exchange that takes what is its own from the state of all stages.

    Args:
        path: Of this rank's stages.

    """

    def __init__(self, path: GradientPath) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def load_state(self, state: Mapping[str, Parts]) -> None:
        """Take the state of this rank's parameters."""
        own = self._path.parameters
        self._path.load_state({k: {n: v for n, v in parts.items() if n in own} for k, parts in state.items()})
