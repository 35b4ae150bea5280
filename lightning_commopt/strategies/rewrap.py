"""Parameters that are frozen or unfrozen in the course of a fit."""

from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["Trainable", "wrap_again", "wrap_again_if_changed"]


class Trainable:
    """Which parameters of a module were trainable when DDP wrapped it.

    Args:
        module: About to be wrapped.

    """

    def __init__(self, module: Module) -> None:
        self._parameters = list(module.parameters())
        self._flags = [p.requires_grad for p in self._parameters]
        self.identities = frozenset(id(p) for p in self._parameters if p.requires_grad)

    def changed(self, *, may_be_unused: bool) -> bool:
        """Return whether DDP must learn of a change.

        Args:
            may_be_unused: Whether DDP bears with parameters that get no gradient: one that was frozen is no change.

        """
        now = [p.requires_grad for p in self._parameters]
        if now == self._flags:
            return False
        return not may_be_unused or any(new > old for new, old in zip(now, self._flags, strict=True))


def wrap_again_if_changed(strategy: "CommOptStrategy", batch_idx: int) -> None:
    """Wrap the module again where other parameters are trainable than before, on all ranks alike.

    Residuals and the method's own state stay, by parameter name. It is no collective where nothing has changed. Ranks
    must change at the same batch: one that changes alone waits for the others until the group's timeout.

    Args:
        strategy: Before a batch, when no backward is running.
        batch_idx: Of that batch in its epoch.

    Raises:
        FingerprintError: On every rank, where ranks did not change alike.
        RuntimeError: Gradients are being accumulated.

    """
    wrapped, module = strategy.model, strategy.lightning_module
    if not isinstance(wrapped, DistributedDataParallel) or strategy._wrapped is None:
        return
    before = strategy._wrapped
    if not before.changed(may_be_unused=wrapped.find_unused_parameters):
        return
    assert module is not None
    if module.automatic_optimization and batch_idx % module.trainer.accumulate_grad_batches:
        raise RuntimeError(
            "Parameters were frozen or unfrozen while gradients are being accumulated, and those of this rank would "
            "be mixed with means: do it before the first batch of an accumulation window, such as in "
            "`on_train_epoch_start`."
        )
    wrap_again(strategy, module)
    rank_zero_info(
        f"commopt: {len(strategy._wrapped.identities)} parameters are trainable from here on, "
        f"{len(before.identities)} were before: the module was wrapped again."
    )


def wrap_again(strategy: "CommOptStrategy", module: Module) -> None:
    """Wrap the module again, on all ranks alike, with the strategy's method and DDP arguments as they are now.

    Args:
        strategy: Between two batches.
        module: The module.

    """
    wrapped = strategy.model
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped._remove_autograd_hooks()
    arguments = strategy._ddp_kwargs
    strategy._ddp_kwargs = arguments | {"init_sync": False}  # ranks are equal, but for buffers that may differ
    try:
        strategy.model = strategy._setup_model(module)
    finally:
        strategy._ddp_kwargs = arguments
    strategy._pl_static_graph_delay_done = False
    strategy._register_ddp_hooks()
    if strategy._auto is not None:
        strategy._auto.follow(module)
