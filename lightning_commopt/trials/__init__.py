"""Short runs of a user's own Trainer, to see what is wrong with it and which settings suit it."""

from lightning_commopt.trials.faults import ScriptError, TargetError
from lightning_commopt.trials.options import StopAfter, quiet, trainer_options
from lightning_commopt.trials.target import Setup, Target

__all__ = ["ScriptError", "Setup", "StopAfter", "Target", "TargetError", "quiet", "trainer_options"]
