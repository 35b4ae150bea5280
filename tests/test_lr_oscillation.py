"""`LinearLRScaling(on_oscillation=...)`: one decision on the mean loss, at the same step on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_commopt.callbacks import LinearLRScaling
from tests.lr_toy import BASE, Fit, Saved, Toy, fit, loader
from tests.pool import WorkerPool

STEPS = 64
SAVED_AT = 25
FACTOR = 4.0


class Swinging(Toy):
    """Its loss alternates on rank 1, and is steady on rank 0.

    Args:
        swing: Of rank 1's loss.
    """

    def __init__(self, swing: float = 0.5, by_hand: bool = False) -> None:
        super().__init__()
        self.swing = swing
        self.automatic_optimization = not by_hand

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        level = 1.0 + self.global_rank * self.swing * (-1) ** self.trainer.global_step
        loss = 0.0 * self.loss(batch) + level  # a resumed epoch begins its data anew
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        return None


def swing_case(action: Any, ckpt_path: Path | None = None, folder: Path | None = None, **options: Any) -> Fit:
    """Scaled by 4 on two ranks."""
    scaling = LinearLRScaling(8 * options.get("accumulate_grad_batches", 1), warmup_steps=0, on_oscillation=action)
    saved = [] if folder is None else [Saved(folder, SAVED_AT)]
    batches = loader(STEPS * options.get("accumulate_grad_batches", 1), ranks=2)
    return fit(Swinging(), batches, scaling, *saved, ckpt_path=ckpt_path, **options)


def whole_and_resumed(folder: Path) -> tuple[Fit, Fit]:
    whole = swing_case("reduce", folder=folder)
    return whole, swing_case("reduce", ckpt_path=folder / f"step{SAVED_AT}.ckpt")


def test_the_rate_is_halved_down_to_the_base_rate_and_stays_so_after_resume(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(whole_and_resumed, 2, tmp_path)
    expected = [BASE * FACTOR] * 20 + [BASE * FACTOR / 2] * 20 + [BASE] * (STEPS - 40)
    for whole, rest in ranks:
        assert whole.first == pytest.approx(expected, rel=1e-12)
        assert rest.used == whole.used[SAVED_AT:]
        assert rest.state == whole.state
        assert whole.state["on_oscillation"]["reduction"] == 1 / FACTOR
    whole, rest = ranks[0]
    assert [text.split(". ")[1].split(",")[0] for text in whole.warnings] == [
        "The learning rate goes on at 0.5 of what was planned",
        "The learning rate goes on at 0.25 of what was planned",
        "The learning rate is that of the base batch",
    ]
    assert "(steps 1 to 20)" in whole.warnings[0]
    assert not ranks[1][0].warnings
    assert any("goes on at 0.5 of what is planned" in line for line in rest.lines)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_a_warning_changes_nothing(pool: WorkerPool, options: dict[str, Any]) -> None:
    zero, one = pool.run(swing_case, 2, "warn", **options)
    assert zero.first == one.first == [BASE * FACTOR] * STEPS
    (text,) = zero.warnings
    assert "the loss changes sides in 100% of the steps, by 25% of its level" in text
    assert "choose `on_oscillation='reduce'`" in text


def off_or_steady(action: Any, swing: float) -> Fit:
    scaling = LinearLRScaling(8, warmup_steps=0, on_oscillation=action)
    return fit(Swinging(swing), loader(STEPS, ranks=dist.get_world_size()), scaling)


@pytest.mark.parametrize(("action", "swing"), [("off", 0.5), ("reduce", 0.0)])
def test_nothing_is_said_without_a_reason(pool: WorkerPool, action: str, swing: float) -> None:
    ran = pool.run(off_or_steady, 2, action, swing)[0]
    assert ran.first == [BASE * FACTOR] * STEPS
    assert not ran.warnings
    assert ("on_oscillation" in ran.state) == (action != "off")


def test_a_loss_is_needed() -> None:
    with pytest.raises(ValueError, match="return it from `training_step`"):
        fit(Swinging(by_hand=True), loader(3), LinearLRScaling(8, warmup_steps=0, on_oscillation="warn"))


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="`on_oscillation` must be 'warn', 'reduce' or 'off'"):
        LinearLRScaling(8, on_oscillation="stop")  # type: ignore[arg-type]
