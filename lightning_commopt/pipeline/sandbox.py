"""What a run of the user's step must not leave behind."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

__all__ = ["isolated_randomness", "muted_logging", "saved_metrics", "seed_all"]


@contextlib.contextmanager
def isolated_randomness(device: torch.device) -> Iterator[None]:
    """Give torch, Python and NumPy their random states back at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def saved_metrics(module: nn.Module) -> Iterator[None]:
    """Give torchmetrics their states back at the end."""
    saved = [(metric, _copied(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    try:
        yield
    finally:
        for metric, attributes in saved:
            metric.__dict__.update(attributes)


@contextlib.contextmanager
def muted_logging(module: nn.Module, see: Callable[[Any], None]) -> Iterator[None]:
    """Let ``self.log`` hand its value to a function, and log nothing."""
    module.__dict__["log"] = lambda name, value, *args, **kwargs: see(value)
    try:
        yield
    finally:
        module.__dict__.pop("log", None)


def _copied(metric: Metric) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value, list) else value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in metric.__dict__.items()
    }
