"""Scales learning rates with the effective batch size."""

from lightning_commopt.callbacks.lr_scaling.linear_lr_scaling import LinearLRScaling

__all__ = ["LinearLRScaling"]
