"""The loss of a rank that may have ended: with weight 0, and the others' with so much more."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_commopt.uneven.fetcher import AgreedFetcher

__all__ = ["JoinedLoss", "refuse_synced_batch_norm"]

_EVERY_BATCH = ("training_step", "on_train_batch_start", "on_train_batch_end")


class JoinedLoss:
    """Weights losses so that the plain mean over ranks is the mean over batches that are not repeated.

    A window of ``L`` batches on ``W`` ranks has ``L W`` places, of which ``n`` hold a batch of their own. Its gradient
    is the sum over these divided by ``n``, times ``L / K``, with which Lightning divides a window that is shorter than
    ``K = accumulate_grad_batches``. Under manual optimisation every backward pass is a window of one batch.

    Since weights act before gradients are exchanged, every method carries them, and its residuals stay in units of the
    mean.
    """

    def __init__(self) -> None:
        self._places = self._own = 0
        self._counted = -1
        self._logged = 0

    def weighted(self, loss: Tensor, module: "pl.LightningModule") -> Tensor:
        """Return the loss to run backward on; gradients accumulated in this window are scaled likewise.

        Args:
            loss: The loss of the batch at hand, 0-d.
            module: The module in training.

        Raises:
            ValueError: A value is logged with ``sync_dist=True`` for each batch.

        """
        self._refuse_synced_logs(module)
        fetcher = _fetcher(module)
        if fetcher is None:
            return loss
        if not module.automatic_optimization:
            return loss * (fetcher.world / fetcher.live) if fetcher.live < fetcher.world else loss
        loop, window = module.trainer.fit_loop.epoch_loop, module.trainer.accumulate_grad_batches
        first = loop.batch_idx % window == 0
        self._count(loop.batch_idx, fetcher, first)
        if loop._should_accumulate() or self._own == self._places:
            return loss
        factor = self._places / self._own
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        if not first and gradients:
            torch._foreach_mul_(gradients, factor)
        return loss * factor

    @contextmanager
    def silenced(self, module: "pl.LightningModule") -> Iterator[None]:
        """During a backward pass over a repeated batch, make every gradient zero.

        A loss times zero would do so only where all local derivatives are finite. The graph stays as it is, so that
        DDP is told of the same parameters as ever.
        """
        fetcher = _fetcher(module)
        if fetcher is None or not fetcher.repeats:
            yield
            return
        handles = [p.register_hook(torch.zeros_like) for p in module.parameters() if p.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, batch: int, fetcher: AgreedFetcher, first: bool) -> None:
        """Add the batch at hand to its window; an optimizer may run the closure of a batch more than once."""
        if first:
            self._places = self._own = 0
        elif batch == self._counted:
            return
        self._counted = batch
        self._places += fetcher.world
        self._own += fetcher.live

    def _refuse_synced_logs(self, module: "pl.LightningModule") -> None:
        """Refuse values of each batch that are reduced over ranks, as soon as they are logged."""
        logged = module.trainer.fit_loop.epoch_loop._results
        if len(logged) == self._logged:
            return
        for metric in logged.values():
            if metric.meta.fx in _EVERY_BATCH and metric.is_tensor and metric.meta.sync.should:
                raise ValueError(
                    f"`self.log({metric.meta.name!r}, ..., sync_dist=True)` in `{metric.meta.fx}` with `uneven='join'`:"
                    " the mean over ranks would count repeated batches. Log without `sync_dist`, log it in validation, "
                    "or choose `uneven='trim'`."
                )
        self._logged = len(logged)


def refuse_synced_batch_norm(model: nn.Module) -> None:
    """Refuse layers that compute statistics over ranks in their forward pass.

    Raises:
        ValueError: Naming the module, and what to do instead.

    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"`{name}` is a SyncBatchNorm, whose statistics would count repeated batches under `uneven='join'`: "
                "choose `uneven='trim'`, or a norm of each rank (`Trainer(sync_batchnorm=False)`)."
            )


def _fetcher(module: "pl.LightningModule") -> AgreedFetcher | None:
    """The fetcher of the fit, where ranks differ or may."""
    fetcher = module.trainer.fit_loop._data_fetcher
    return fetcher if isinstance(fetcher, AgreedFetcher) else None
