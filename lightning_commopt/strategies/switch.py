"""Puts in force what ``auto`` chose: the strategy's options, the gradient path, and DDP around the module."""

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compression import Uncompressed, method_named
from lightning_commopt.measure import CommStats
from lightning_commopt.strategies.rewrap import wrap_again
from lightning_commopt.tuning import Choice

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["Switch"]


class Switch:
    """Changes how a strategy exchanges gradients, on all ranks alike, between two windows of accumulation.

    Args:
        strategy: The strategy, with the options that the user gave.
        cosine_every: Exchanges between two comparisons of a compressed mean with the dense one.
        propagates: Whether the user wants gradients that are not finite to go through, whatever is in force.

    """

    def __init__(self, strategy: "CommOptStrategy", cosine_every: int, *, propagates: bool = False) -> None:
        self.own_arguments = dict(strategy._ddp_kwargs)
        """Of DDP, as the user gave them."""
        self.choice = Choice()
        """In force."""
        self._strategy = strategy
        self._cosine_every = cosine_every
        self._propagates = propagates
        self._retired: CommStats | None = None

    def begin(self, choice: Choice) -> None:
        """Begin a fit with a choice, before the module is wrapped."""
        self._retired = None
        self._set_options(choice)

    def keeps_residuals(self, choice: Choice) -> bool:
        """Whether the next method can take over what this one owes: it owes too, for the same parameters."""
        new, old, path = method_named(choice.method), self._strategy.compression, self._strategy._path
        if new == old:
            return True
        if path is None or path.node is not None or not new.error_feedback:
            return False
        return all(new.travels_exactly(p.shape) == old.travels_exactly(p.shape) for p in path.parameters.values())

    def put_in_force(self, choice: Choice) -> None:
        """Put a choice in force: in the path that is there, or by wrapping the module again."""
        strategy, path = self._strategy, self._strategy._path
        method = method_named(choice.method)
        if path is not None and not isinstance(method, Uncompressed):
            self._set_options(choice)
            if method != path.method:
                path.switch(method)
        else:
            self._retire()
            self._set_options(choice)
            assert isinstance(strategy.model, DistributedDataParallel)
            assert strategy.lightning_module is not None
            wrap_again(strategy, strategy.lightning_module)
        self.equip_path()
        if strategy._path is not None:
            strategy._path.error_due = True
            strategy._path.termination.asked = strategy._sigterm is not None and strategy._sigterm.asked
        elif strategy._log is not None and strategy.root_device.type == "cpu":
            strategy._log.sample_often()

    def equip_path(self) -> None:
        """Tell the gradient path, where there is one, what goes beyond its method."""
        path = self._strategy._path
        if path is not None:
            path.dense_buckets = self.choice.dense_buckets
            path.mean_check.every = self._cosine_every

    def with_retired(self, stats: CommStats) -> CommStats:
        """Add what was exchanged before the module was wrapped again."""
        return stats if self._retired is None else self._retired + stats

    def _retire(self) -> None:
        """Close what exchanges now; its counters stay."""
        strategy, path, log = self._strategy, self._strategy._path, self._strategy._log
        if path is not None:
            self._retired = self.with_retired(path.stats())
            path.close()
            strategy._path = None
            if strategy._steps is not None:
                strategy._steps.close()
                strategy._steps = None
        elif log is not None:
            self._retired = self.with_retired(log.stats())
            log.close()
            strategy._log = None
        if strategy._reached is not None:
            strategy._reached.close()
            strategy._reached = None

    def _set_options(self, choice: Choice) -> None:
        """Set the strategy's options to what a choice means."""
        strategy, method = self._strategy, method_named(choice.method)
        self.choice = choice
        strategy.compression = method
        strategy.start_step = 0
        strategy.nonfinite = "error" if method.error_feedback and not self._propagates else "propagate"
        own_size = choice.bucket_mb is None or isinstance(method, Uncompressed)
        strategy._ddp_kwargs = self.own_arguments | ({} if own_size else {"bucket_cap_mb": choice.bucket_mb})
        strategy._checkpoint.signature = strategy._signature()
