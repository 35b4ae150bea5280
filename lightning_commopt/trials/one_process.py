"""Trials in one process, where Lightning's tuner works: it refuses every distributed strategy."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, RandomSampler

from lightning_commopt.trials.faults import TargetError
from lightning_commopt.trials.options import quiet
from lightning_commopt.trials.target import Setup, Target

__all__ = ["Rebatched", "alone", "batch_size_of", "with_batch_size"]


class Rebatched(LightningDataModule):
    """Training data with a batch size that can be set.

    Args:
        loader: Over a dataset with a length and batches of a size.

    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__()
        self.loader = loader
        self.batch_size = loader.batch_size

    def train_dataloader(self) -> "DataLoader[Any]":
        """Return the same loader with another batch size."""
        given = self.loader
        return DataLoader(
            given.dataset,
            batch_size=self.batch_size,
            shuffle=isinstance(given.sampler, RandomSampler),
            collate_fn=given.collate_fn,
            num_workers=given.num_workers,
            pin_memory=given.pin_memory,
            drop_last=given.drop_last,
        )


def alone(target: Target, folder: str, options: Mapping[str, Any]) -> Setup:
    """Make the user's Trainer for one process and one batch a step, with further options."""
    one = {"strategy": "auto", "devices": 1, "num_nodes": 1, "accumulate_grad_batches": 1, "sync_batchnorm": False}
    setup = target.make(lambda given: {**quiet(given, folder), **one, **options})
    _forget_validation_without_data(setup)
    return setup


def _forget_validation_without_data(setup: Setup) -> None:
    """Lightning's tuner asks for validation data wherever there is a validation step; ``fit`` does not."""
    model = setup.model
    owners = [model, *([setup.data] if isinstance(setup.data, LightningDataModule) else [])]
    if not any(is_overridden("val_dataloader", owner) for owner in owners):
        model.validation_step = MethodType(LightningModule.validation_step, model)  # type: ignore[method-assign]


def with_batch_size(setup: Setup, name: str, size: int | None) -> Setup:
    """Give the data another batch size.

    Args:
        setup: Not yet used.
        name: Attribute or hyperparameter of model or data module that holds the size.
        size: Samples; None to leave it as it is.

    Raises:
        TargetError: Nothing holds the size.

    """
    if isinstance(setup.data, DataLoader) and isinstance(setup.data.batch_size, int):
        setup = Setup(setup.trainer, setup.model, Rebatched(setup.data), setup.options)
    owners = [setup.model, *([setup.data] if isinstance(setup.data, LightningDataModule) else [])]
    held = [owner for owner in owners if hasattr(owner, name)]
    named = [owner.hparams for owner in owners if name in owner.hparams]
    if not held and not named:
        raise TargetError(
            f"neither model nor data module has `{name}`: keep the batch size there and read it in "
            "`train_dataloader`, return a DataLoader as `data`, or name the attribute with `--batch-name`"
        )
    if size is not None:
        for owner in held:
            setattr(owner, name, size)
        for values in named:
            values[name] = size
    return setup


def batch_size_of(setup: Setup, name: str) -> int | None:
    """Return the batch size that model or data hold now; None where nothing holds one."""
    if isinstance(setup.data, DataLoader):
        return setup.data.batch_size if isinstance(setup.data.batch_size, int) else None
    for owner in (setup.data, setup.model):
        held = getattr(owner, name, None)
        held = getattr(owner, "hparams", {}).get(name) if held is None else held
        if isinstance(held, int):
            return held
    return None
