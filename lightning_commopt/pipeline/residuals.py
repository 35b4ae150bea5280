"""Residuals of a whole model from the stages of a pipeline, as one data-parallel rank would have them."""

from collections.abc import Mapping
from typing import Any

from lightning_commopt.compression import Compression
from lightning_commopt.compression.pending import Parts
from lightning_commopt.pipeline.groups import PipelineGroups
from lightning_commopt.routes import GradientPath

__all__ = ["MergedPath", "StagePath"]


class MergedPath:
    """The exchanges of all stages together, to be saved by the first rank of a pipeline. Making one is a collective.

    Args:
        path: Of this rank's stages.
        groups: The process groups.

    """

    def __init__(self, path: GradientPath, groups: PipelineGroups) -> None:
        self.method: Compression = path.method
        self.world, self.shards = path.world, path.shards
        self.rounds, self.applied_steps = path.rounds, path.applied_steps
        self.keeps_residuals = path.keeps_residuals
        self._state: dict[str, Parts] = {}
        suffix = _suffix(groups)
        own = {kind: {name + suffix: value for name, value in parts.items()} for kind, parts in path.state().items()}
        for state in reversed(groups.copy_control.gather(own) or []):  # of a shared parameter, the first stage's counts
            for kind, parts in state.items():
                self._state.setdefault(kind, {}).update(parts)

    def state(self) -> dict[str, Parts]:
        """Return the state of all stages."""
        return self._state


class StagePath:
    """An exchange that takes what is its own from the state of all stages.

    Args:
        path: Of this rank's stages.
        groups: The process groups.

    """

    def __init__(self, path: GradientPath, groups: PipelineGroups) -> None:
        self._path, self._suffix = path, _suffix(groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def load_state(self, state: Mapping[str, Parts]) -> None:
        """Take the state of this rank's parameters."""
        own = {name + self._suffix: name for name in self._path.parameters}
        self._path.load_state({k: {own[n]: v for n, v in parts.items() if n in own} for k, parts in state.items()})


def _suffix(groups: PipelineGroups) -> str:
    """Tell apart the residuals of ranks that have different parts of the same matrices."""
    return "" if groups.tensor is None else f" slice {groups.slice}"
