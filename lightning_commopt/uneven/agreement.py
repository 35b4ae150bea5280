"""Agreement of the ranks on the number of training batches, wherever data was loaded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_commopt.routes import ControlGroup
from lightning_commopt.uneven.after_loading import LoopPatches, empty_loaders_allowed
from lightning_commopt.uneven.counts import Count, Told, Uneven
from lightning_commopt.uneven.evaluation import EvaluationCounts
from lightning_commopt.uneven.fetcher import SizedFetcher, UnsizedFetcher
from lightning_commopt.uneven.joined_loss import JoinedLoss, refuse_synced_batch_norm

__all__ = ["UnevenBatches"]


class UnevenBatches:
    """Lets all ranks end their epochs at the same batch, or none begin one.

    Loaders with a length are compared when they are loaded, by one all-gather. Without a length ranks tell each other
    before each batch whether another one follows.

    Args:
        policy: ``"error"``, ``"trim"`` or ``"join"``.
        joins: Whether a rank that has ended can go on with weight 0, which takes DDP.

    Raises:
        ValueError: For another policy, or one that is not possible.

    """

    def __init__(self, policy: Uneven, *, joins: bool = True) -> None:
        known = get_args(Uneven) if joins else ("error", "trim")
        if policy not in known:
            why = " is possible under DDP alone: it" if policy == "join" else ""
            raise ValueError(f"`uneven={policy!r}`{why} must be one of {', '.join(map(repr, known))}.")
        self.policy: Uneven = policy
        self.joins = joins
        self._told = Told(joins=joins)
        self._patches = LoopPatches()
        self._control: ControlGroup | None = None
        self._joined: JoinedLoss | None = None

    def attach(self, trainer: "pl.Trainer", control: ControlGroup, forward: ControlGroup | None = None) -> None:
        """Agree from now on whenever the Trainer loads data.

        Args:
            trainer: At the beginning of the strategy's set-up.
            control: Agreement between ranks; there are at least two.
            forward: Those with which this rank runs each forward together, since they share a model: evaluation, too,
                must have as many batches on all of them. None: it runs them alone.

        """
        self.detach()
        self._control = control
        evaluation: dict[Any, tuple[Any, str]] = {
            TrainerFn.FITTING: (trainer.fit_loop.epoch_loop.val_loop, "validation"),
            TrainerFn.VALIDATING: (trainer.validate_loop, "validation"),
            TrainerFn.TESTING: (trainer.test_loop, "test"),
            TrainerFn.PREDICTING: (trainer.predict_loop, "predict"),
        }
        loop, stage = evaluation.get(trainer.state.fn, (None, ""))
        if loop is not None:
            counts = EvaluationCounts(loop, stage, control, forward, self.policy)
            self._patches.wrap(loop, counts.around_setup)
            self._patches.wrap(loop, counts.around_reset, "reset")
        if trainer.state.fn == TrainerFn.FITTING:
            self._joined = JoinedLoss() if self.policy == "join" else None
            self._patches.wrap(trainer.fit_loop, lambda setup_data: self._load(trainer, control, setup_data))

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        self._patches.undo()
        self._control = self._joined = None

    def check_model(self, model: nn.Module) -> None:
        """Refuse modules that cannot be joined.

        Raises:
            ValueError: Naming the module, and what to do instead.

        """
        if self.policy == "join":
            refuse_synced_batch_norm(model)

    def check_loader(self, loader: object) -> None:
        """Refuse that a loader has a length on some ranks only; Lightning would wait there for ever. A collective.

        Raises:
            ValueError: On every rank, naming those without.

        """
        if self._control is None:
            return
        lengths = self._control.all_gather(sized_len(loader))
        without = [rank for rank, length in enumerate(lengths) if length is None]
        if 0 < len(without) < len(lengths):
            raise ValueError(
                f"A data loader has no length on rank(s) {without}, and one on the others: give it a length "
                "(`__len__`) on all ranks or on none."
            )

    @contextmanager
    def weighted(self, loss: Tensor, module: "pl.LightningModule") -> Iterator[Tensor]:
        """Yield the loss on which to run backward inside this context.

        Args:
            loss: 0-d.
            module: The module in training.

        """
        if self._joined is None:
            yield loss
            return
        loss = self._joined.weighted(loss, module)
        with self._joined.silenced(module):
            yield loss

    def __reduce__(self) -> tuple[Callable[..., "UnevenBatches"], tuple[Uneven]]:
        """A copy, in another process or not, begins unattached."""
        return partial(type(self), joins=self.joins), (self.policy,)

    # ---- agreement ------------------------------------------------------------------------------------------------

    def _load(self, trainer: "pl.Trainer", control: ControlGroup, setup_data: Callable[[], None]) -> None:
        """Load the training data, and agree if that was done anew."""
        loop: Any = trainer.fit_loop
        before = loop._data_fetcher
        with empty_loaders_allowed(trainer) as allowed:
            try:
                setup_data()
            except ValueError:
                if not _interval_too_long(trainer):
                    raise  # else other ranks, which have more batches, went on: see below
        if loop._data_fetcher is before or loop._data_fetcher is None:
            return
        limits = loop._combined_loader.limits
        count = Count(
            batches=loop.max_batches,
            unsized=any(sized_len(loader) is None for loader in loop._combined_loader.flattened),
            empty=loop.max_batches == 0 or (0 in limits and not allowed),
        )
        counts = control.all_gather(count)
        if all(count.empty for count in counts):
            return
        if empty := [rank for rank, count in enumerate(counts) if count.empty]:
            raise ValueError(self._told.none(empty))
        if any(count.unsized for count in counts):
            self._unsized(loop, control, counts)
        else:
            self._sized(loop, control, [int(count.batches) for count in counts])
        if _interval_too_long(trainer):
            raise ValueError(
                f"`val_check_interval={trainer.val_check_interval}` is more than the {loop.max_batches} training "
                "batches of an epoch: choose a smaller one, or `check_val_every_n_epoch=None` to count over epochs."
            )

    def _sized(self, loop: Any, control: ControlGroup, batches: Sequence[int]) -> None:
        """Agree on the end of every epoch."""
        if len(set(batches)) == 1:
            return
        if self.policy == "error":
            raise ValueError(self._told.uneven(batches))
        self._refuse_own_fetching(loop)
        end = min(batches) if self.policy == "trim" else max(batches)
        loop.max_batches = end
        trainer = loop.trainer
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(end * trainer.val_check_interval))
        loop._data_fetcher = SizedFetcher(loop._data_fetcher, batches, control.rank, end)
        what = "every rank stops after" if self.policy == "trim" else "shorter ones repeat their last, weight 0, up to"
        rank_zero_info(f"commopt: training batches by rank {list(batches)}: {what} {end}.")

    def _unsized(self, loop: Any, control: ControlGroup, counts: Sequence[Count]) -> None:
        """Agree before each batch."""
        if self.policy == "error" and isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            rank_zero_warn(
                "`training_step(dataloader_iter)` draws its batches itself, and its loader has no length: nothing "
                "watches that all ranks have as many."
            )
            return
        self._refuse_own_fetching(loop)
        limit, loop.max_batches = loop.max_batches, max(count.batches for count in counts)
        loop._data_fetcher = UnsizedFetcher(loop._data_fetcher, control, limit, self.policy, self._told)

    def _refuse_own_fetching(self, loop: Any) -> None:
        """Refuse a module that takes the iterator itself."""
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                f"`uneven={self.policy!r}` with `training_step(dataloader_iter)`, which draws its batches itself: take "
                "`training_step(batch, batch_idx)`, or give every rank as many batches."
            )


def _interval_too_long(trainer: "pl.Trainer") -> bool:
    """Whether validation is due after more batches than an epoch has, which Lightning refuses."""
    interval = trainer.val_check_interval
    return (
        isinstance(interval, int)
        and getattr(trainer, "_val_check_time_interval", None) is None
        and interval > trainer.fit_loop.max_batches
        and trainer.check_val_every_n_epoch is not None
        and trainer.limit_val_batches > 0
    )
