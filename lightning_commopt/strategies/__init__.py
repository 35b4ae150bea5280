"""The strategies that a Trainer takes, one class a file."""

from lightning_commopt.strategies.commopt import CommOptStrategy
from lightning_commopt.strategies.names import register

__all__ = ["CommOptStrategy", "register"]
