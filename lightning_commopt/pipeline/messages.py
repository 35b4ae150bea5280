"""What stages hand to each other."""

from typing import NamedTuple

from lightning_commopt.pipeline.actions import Action, Kind

__all__ = ["Message", "incoming", "outgoing"]


class Message(NamedTuple):
    """Activations of one microbatch for the next stage, or their gradients for the previous one."""

    source: int
    target: int
    microbatch: int

    @property
    def is_gradient(self) -> bool:
        """Whether it goes backwards."""
        return self.target < self.source

    def __str__(self) -> str:
        what = "gradient" if self.is_gradient else "activation"
        return f"{what} {self.microbatch} of stage {self.source} for stage {self.target}"


def incoming(action: Action, stages: int) -> Message | None:
    """Return what another stage must have handed over before this action, of a pipeline of ``stages``."""
    if action.kind is Kind.FORWARD:
        source = action.stage - 1
    elif action.kind is Kind.BACKWARD_WEIGHT:
        return None
    else:
        source = action.stage + 1
    return Message(source, action.stage, action.microbatch) if 0 <= source < stages else None


def outgoing(action: Action, stages: int) -> Message | None:
    """Return what this action makes for another stage, of a pipeline of ``stages``."""
    if action.kind is Kind.FORWARD:
        target = action.stage + 1
    elif action.kind is Kind.BACKWARD_WEIGHT:
        return None
    else:
        target = action.stage - 1
    return Message(action.stage, target, action.microbatch) if 0 <= target < stages else None
