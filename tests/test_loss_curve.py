"""When a loss counts as swinging or rising, and when not."""

import math
import random
from collections.abc import Callable

import pytest

from lightning_commopt.callbacks.lr_scaling.loss_curve import LossCurve

STEPS = 2000


def falling(step: int, noise: float) -> float:
    return 2.0 * math.exp(-step / 200) + 0.3 + noise


STEADY: dict[str, Callable[[int, random.Random], float]] = {
    "falling": lambda step, r: falling(step, r.gauss(0, 0.02)),
    "noisy": lambda step, r: falling(step, r.gauss(0, 0.3)),
    "plateau": lambda step, r: 1.0 + r.gauss(0, 0.2),
    "towards zero": lambda step, r: math.exp(-step / 100) * math.exp(r.gauss(0, 0.5)) + 1e-6,
    "negative": lambda step, r: -5.0 + falling(step, r.gauss(0, 0.1)),
    "a spike": lambda step, r: falling(step, r.gauss(0, 0.02)) + 3.0 * (step == 1234),
    "heavy tails": lambda step, r: 1.0 + 0.1 * r.gauss(0, 1) / math.sqrt(r.gammavariate(1.5, 2 / 3)),  # Student's t, 3
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", STEADY)
def test_noise_is_no_finding(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    assert LossCurve().add(STEADY[kind](step, draw) for step in range(STEPS)) is None


UNSTEADY: dict[str, tuple[str, Callable[[int], float]]] = {
    "alternating": ("oscillation", lambda step: 1.0 + 0.2 * (-1) ** step),
    "growing swing": ("oscillation", lambda step: 1.0 + 0.02 * 1.1 ** min(step, 40) * math.sin(step)),
    "rising": ("divergence", lambda step: 2.0 - step / 100 if step < 100 else 1.0 + (step - 100) / 50),
    "not finite": ("not finite", lambda step: math.nan if step == 99 else 1.0),
}


@pytest.mark.parametrize("kind", UNSTEADY)
def test_unsteady(kind: str) -> None:
    expected, curve = UNSTEADY[kind]
    watch = LossCurve()
    seen = next(seen for step in range(400) if (seen := watch.add([curve(step)])) is not None)
    assert seen.kind == expected
    assert seen.step == {"alternating": 20, "not finite": 100}.get(kind, seen.step) <= 200


def test_a_saved_curve_goes_on_as_if_never_stopped() -> None:
    whole, begun, resumed = LossCurve(), LossCurve(), LossCurve()
    curve = UNSTEADY["rising"][1]
    expected = [whole.add([curve(step)]) for step in range(300)]
    ours = [begun.add([curve(step)]) for step in range(117)]
    resumed.load_state_dict(begun.state_dict())
    assert ours + [resumed.add([curve(step)]) for step in range(117, 300)] == expected
