"""How long a step takes, and what it keeps in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.pipeline.actions import Action, Kind, Schedule
from lightning_commopt.pipeline.messages import Message, incoming, outgoing

__all__ = ["Simulation", "StageCost", "peak_activations", "simulate"]


@dataclass(frozen=True)
class StageCost:
    """What one microbatch costs on one stage, in seconds or any other unit.

    Args:
        forward: The forward.
        backward: The whole backward.
        weight: The part of the backward that a schedule may put off: gradients of weights.

    """

    forward: float
    backward: float
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not (self.forward >= 0 and 0 <= self.weight <= self.backward):
            raise ValueError(f"`{self}`: costs must not be negative, and `weight` is a part of `backward`.")

    def of(self, kind: Kind) -> float:
        """Return the cost of one action."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward - self.weight,
            Kind.BACKWARD_WEIGHT: self.weight,
        }[kind]


@dataclass(frozen=True)
class Simulation:
    """One step of a schedule.

    Args:
        step: Time from the first action to the last.
        busy: Time that each rank computes.
        starts: When each action starts.

    """

    step: float
    busy: tuple[float, ...]
    starts: dict[Action, float]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step that each rank does not compute."""
        return tuple(1 - busy / self.step for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Mean over all ranks of the fraction of the step that they do not compute."""
        return sum(self.bubbles) / len(self.busy)


def simulate(schedule: Schedule, costs: Sequence[StageCost], transfer: float = 0.0) -> Simulation:
    """Run a schedule on a clock.

    Every action starts as soon as its rank is free and its message is there. Transfers hinder neither computation nor
    each other.

    Args:
        schedule: What each rank computes.
        costs: Of each stage.
        transfer: Time that a message takes to another rank.

    Raises:
        ValueError: There is not one cost for each stage, or ranks wait for each other in a circle.

    """
    if len(costs) != schedule.stages:
        raise ValueError(f"`{len(costs)}` costs were given for `{schedule.stages}` stages.")
    free, done = [0.0] * schedule.ranks, [0] * schedule.ranks
    arrivals: dict[Message, float] = {}
    starts: dict[Action, float] = {}

    def advance(rank: int) -> bool:
        """Run actions of a rank until one has to wait."""
        before = done[rank]
        for action in schedule.actions[rank][before:]:
            message = incoming(action, schedule.stages)
            if message is not None and message not in arrivals:
                break
            starts[action] = max(free[rank], arrivals[message] if message else 0.0)
            free[rank] = starts[action] + costs[action.stage].of(action.kind)
            if made := outgoing(action, schedule.stages):
                arrivals[made] = free[rank] + (transfer if schedule.placement[made.target] != rank else 0.0)
            done[rank] += 1
        return done[rank] > before

    while any(advance(rank) for rank in range(schedule.ranks)):
        pass
    waiting = {rank: str(order[done[rank]]) for rank, order in enumerate(schedule.actions) if done[rank] < len(order)}
    if waiting:
        raise ValueError(f"Ranks wait for each other in a circle; next would be `{waiting}`.")
    busy = (sum(costs[action.stage].of(action.kind) for action in actions) for actions in schedule.actions)
    return Simulation(max(free), tuple(busy), starts)


def peak_activations(schedule: Schedule, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the most that each rank holds for its backwards at any time.

    The activations of a microbatch on a stage are held from its forward to the end of its whole backward.

    Args:
        schedule: What each rank computes.
        sizes: Bytes that one microbatch holds on each stage; without it, microbatches are counted.

    """
    return tuple(_peak(actions, sizes or [1] * schedule.stages) for actions in schedule.actions)


def _peak(actions: Sequence[Action], sizes: Sequence[float]) -> float:
    held = most = 0.0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += sizes[action.stage]
            most = max(most, held)
        elif action.kind is not Kind.BACKWARD_INPUT:
            held -= sizes[action.stage]
    return most
