"""Measures link and codecs, predicts what a method would give, and chooses one."""

from lightning_commopt.tuning.cost_model import (
    Channel,
    CodecCost,
    ComputeProfile,
    Link,
    Plan,
    Prediction,
    bucket_numels,
    predict,
)

__all__ = ["Channel", "CodecCost", "ComputeProfile", "Link", "Plan", "Prediction", "bucket_numels", "predict"]
