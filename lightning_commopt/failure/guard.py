"""Launchers whose function is the first to be asked about an exception, in the process where it is raised."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from lightning_commopt.failure.verdict import RankFailure

if TYPE_CHECKING:
    from lightning_commopt.failure.strategy import FailTogether

__all__ = ["guard_launcher", "release_children"]


class _Guarded:
    """A function under guard.

    Args:
        strategy: Whose watch is told of an exception.
        function: What the launcher is to run.
        leaves: Whether the process ends with the function, without the strategy's teardown.

    """

    def __init__(self, strategy: "FailTogether", function: Callable[..., Any], leaves: bool) -> None:
        self.strategy = strategy
        self.function = function
        self.leaves = leaves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except _TunerExitException:
            raise
        except BaseException as error:
            watch = self.strategy.watch
            if watch is None:
                raise
            outcome = watch.failed(error)
            if self.leaves:
                watch.stop()
                if not isinstance(outcome, Exception):  # torch would take it for a good end
                    raise RankFailure(watch.message()) from error
            if outcome is error:
                raise
            raise outcome from None


class _ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once a rank, or finds itself started by torchrun and the like."""

    strategy: "FailTogether"
    kept: list[Any]

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kw: Any) -> Any:
        if trainer is not None:
            self.strategy.before_launch(trainer)
        guarded = _Guarded(self.strategy, function, leaves=False)
        return super().launch(guarded, *args, trainer=trainer, **kw)


class _ProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks."""

    _strategy: "FailTogether"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kw: Any) -> Any:
        if trainer is not None:
            self._strategy.before_launch(trainer)
        guarded = _Guarded(self._strategy, function, leaves=True)
        return super().launch(guarded, *args, trainer=trainer, **kw)


def guard_launcher(strategy: "FailTogether") -> None:
    """Let a strategy's launcher run functions under guard. A launcher that is not Lightning's stays as it is."""
    launcher = strategy._launcher
    if type(launcher) is _SubprocessScriptLauncher:
        launcher.__class__ = _ScriptLauncher
        launcher.strategy = strategy
    elif type(launcher) is _MultiProcessingLauncher:
        launcher.__class__ = _ProcessLauncher


def release_children(strategy: "FailTogether") -> None:
    """Keep Lightning's observer from killing this process, and its message and last checkpoint with it.

    It does so when it finds a child that failed, every 5 s. From here on the watch sees to it that all processes end.
    """
    launcher = strategy._launcher
    if isinstance(launcher, _ScriptLauncher) and launcher.procs:
        launcher.kept = list(launcher.procs)  # a Popen that is thrown away warns of a running child
        launcher.procs.clear()
