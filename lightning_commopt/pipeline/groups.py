"""The process groups of pipelines that are replicated."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_commopt.routes import ControlGroup

__all__ = ["PipelineGroups", "SharedGroups"]


class PipelineGroups:
    """Ranks in a grid: replicas of the model, of consecutive ranks; places in a pipeline; slices of matrices.

    The slice counts fastest. Making one is a collective of all ranks.

    Args:
        ranks: Ranks of a pipeline.
        backend: For tensors on the device.
        timeout: Of every group.
        slices: Ranks that divide the matrices of a stage among them.

    Attributes:
        pipeline: The ranks with the same replica and slice, and ``control`` for plain objects.
        data: The ranks with the same place and slice, ``gradients`` for the exchange, and ``data_control``.
        tensor: The ranks with the same replica and place; None where matrices are not divided.
        copy: The ranks with the same replica, and ``copy_control``.

    """

    def __init__(self, ranks: int, backend: str, timeout: timedelta | None, slices: int = 1) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        size = ranks * slices
        self.copies = [list(range(first, first + size)) for first in range(0, world, size)]
        self._pipelines = [copy[slice_::slices] for copy in self.copies for slice_ in range(slices)]
        columns = [list(range(first, world, size)) for first in range(size)]
        self.replica, self.replicas = rank // size, world // size
        self.place, self.slice = rank % size // slices, rank % slices
        self.ranks, self._slices, self._backend, self._timeout = ranks, slices, backend, timeout
        self.pipeline = _own(self._pipelines, backend, timeout)
        self.data = _own(columns, backend, timeout)
        self.gradients = self.data if backend == "nccl" else _own(columns, backend, timeout)
        self.control = ControlGroup(timeout, self._pipelines)
        self.data_control = ControlGroup(timeout, columns)
        self.tensor: dist.ProcessGroup | None = None
        self.copy, self.copy_control = self.pipeline, self.control
        if slices > 1:
            self.tensor = _own(
                [list(range(first, first + slices)) for first in range(0, world, slices)], backend, timeout
            )
            self.copy = _own(self.copies, backend, timeout)
            self.copy_control = ControlGroup(timeout, self.copies)

    def shared(self, places: Mapping[str, tuple[int, ...]]) -> "SharedGroups":
        """Make groups for parameters that several ranks of a pipeline hold. A collective of all ranks.

        Args:
            places: The places in the pipeline that hold each parameter, by name.

        """
        groups = {}
        for members in sorted({p for p in places.values() if len(p) > 1}):
            parts = [[pipeline[place] for place in members] for pipeline in self._pipelines]
            made = [dist.new_group(part, backend=self._backend, timeout=self._timeout) for part in parts]
            groups[members] = made[self.replica * self._slices + self.slice]
        return SharedGroups({name: p for name, p in places.items() if len(p) > 1}, groups)


class SharedGroups:
    """Who shares which parameters in a pipeline.

    Args:
        places: The places that hold each shared parameter, ascending, by name.
        groups: The group of some places.

    """

    def __init__(
        self, places: Mapping[str, tuple[int, ...]], groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        self.places = dict(places)
        self._groups = dict(groups)

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of a parameter, None where one rank holds it alone."""
        places = self.places.get(name)
        return None if places is None else self._groups[places]

    def counts_here(self, name: str, place: int) -> bool:
        """Whether a place speaks for a parameter where it must be counted once."""
        return self.places.get(name, (place,))[0] == place


def _own(parts: Sequence[Sequence[int]], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group for each part, and return that with this rank."""
    groups = [dist.new_group(part, backend=backend, timeout=timeout) for part in parts]
    own: dist.ProcessGroup = next(group for group in groups if dist.get_rank(group) >= 0)
    return own
