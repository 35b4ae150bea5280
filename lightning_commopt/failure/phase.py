"""Where a rank is."""

from enum import IntEnum

__all__ = ["Activity", "Phase"]


class Phase(IntEnum):
    """Part of a run. Those of one batch come in their order."""

    SET_UP = 0
    TRAINING_STEP = 1
    BACKWARD = 2
    OPTIMIZER_STEP = 3
    BETWEEN_BATCHES = 4
    VALIDATION = 5
    CHECKPOINT = 6

    @property
    def trains(self) -> bool:
        """Whether a rank that stays here for long holds up training without a good reason."""
        return Phase.TRAINING_STEP <= self <= Phase.BETWEEN_BATCHES

    def words(self, step: int) -> str:
        """Return phase and step in words."""
        if self is Phase.BETWEEN_BATCHES:
            return f"between batches after step {step}"
        return f"in {_WORDS[self]}{f' of step {step}' if self.trains else f' at step {step}'}"


_WORDS = {
    Phase.SET_UP: "set-up",
    Phase.TRAINING_STEP: "training_step",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER_STEP: "the optimizer step",
    Phase.VALIDATION: "validation",
    Phase.CHECKPOINT: "writing a checkpoint",
}


class Activity(IntEnum):
    """What a main thread that stays in one place does there."""

    RUNNING = 0
    WAITING = 1  # in a collective
    COMPILING = 2
