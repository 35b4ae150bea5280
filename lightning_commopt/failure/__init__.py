"""Ranks fail together: one message, the same everywhere, and no process is left."""

from lightning_commopt.failure.strategy import FailTogether, FailTogetherDDP
from lightning_commopt.failure.verdict import RankFailure

__all__ = ["FailTogether", "FailTogetherDDP", "RankFailure"]
