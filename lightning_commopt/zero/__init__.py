"""Compressed gradient exchange under DeepSpeed ZeRO.

DeepSpeed has no hook for gradients. All its collectives go through one backend object, and gradients through two of
its methods, which :class:`GradientBackend` takes over while a backward runs. The object is process-wide and
undocumented, so the version is checked, every buffer is matched with the parameters that it should hold, and a step in
which nothing was taken over is an error.
"""

from lightning_commopt.zero.backend import GradientBackend
from lightning_commopt.zero.exchange import ZeroExchange

__all__ = ["GradientBackend", "ZeroExchange"]
