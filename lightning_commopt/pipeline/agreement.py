"""All ranks of a pipeline must see the same batch."""

import zlib
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_commopt.pipeline.errors import PipelineError
from lightning_commopt.pipeline.groups import PipelineGroups
from lightning_commopt.pipeline.microbatches import tensors_in
from lightning_commopt.routes import ControlGroup

__all__ = ["BatchAgreement", "DifferentBatches"]

DifferentBatches = Literal["error", "broadcast"]

_FIRST, _EVERY = 4, 50


class BatchAgreement:
    """Compares the batches of a pipeline's ranks: the first ones of each kind, and later one now and then.

    Args:
        policy: ``"error"``: different ones end all ranks. ``"broadcast"``: the pipeline's first rank gives its batch to
            the others, always.

    """

    def __init__(self, policy: DifferentBatches) -> None:
        if policy not in get_args(DifferentBatches):
            words = ", ".join(map(repr, get_args(DifferentBatches)))
            raise ValueError(f"`different_batches={policy!r}` must be one of {words}.")
        self.policy: DifferentBatches = policy
        self._seen: dict[str, int] = {}

    def agreed(self, batch: Any, kind: str, device: torch.device, groups: PipelineGroups, control: ControlGroup) -> Any:
        """Return the batch that all ranks of the pipeline have. A collective of ``control``, with all of its ranks.

        Raises:
            PipelineError: On every rank of ``control``, naming the ranks that have another one than the first of
                their pipeline.

        """
        if self.policy == "broadcast":
            mine = move_data_to_device(batch, torch.device("cpu")) if groups.copy_control.rank == 0 else None
            return move_data_to_device(groups.copy_control.broadcast(mine), device)
        seen = self._seen[kind] = self._seen.get(kind, -1) + 1
        if seen >= _FIRST and seen % _EVERY:
            return batch
        digests = dict(zip(control.members, control.all_gather(_digest(batch)), strict=True))
        for copy in groups.copies:
            if copy[0] not in digests:
                continue
            other = [rank for rank in copy if digests[rank] != digests[copy[0]]]
            if other:
                raise PipelineError(
                    f"Rank(s) {other} loaded another batch than rank {copy[0]} of their pipeline for `{kind}`. All "
                    "stages must see the same data: use `seed_everything(..., workers=True)` and a sampler with "
                    "`strategy.distributed_sampler_kwargs`, or `different_batches='broadcast'` to send the first "
                    "rank's batch to the others."
                )
        return batch


def _digest(batch: Any) -> int:
    digest = 0
    for tensor in tensors_in(batch):
        digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        digest = zlib.crc32(_bytes_of(tensor), digest)
    return digest


def _bytes_of(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
