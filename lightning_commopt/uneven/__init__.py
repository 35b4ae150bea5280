"""Ranks with different numbers of batches: refused, trimmed to the shortest, or joined with weight 0."""

from lightning_commopt.uneven.agreement import UnevenBatches
from lightning_commopt.uneven.counts import Uneven

__all__ = ["Uneven", "UnevenBatches"]
