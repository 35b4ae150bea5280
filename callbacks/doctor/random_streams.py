"""The random streams of a process: read, compared, set."""

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch

__all__ = ["digests", "read_streams", "set_streams"]


def read_streams(device: torch.device) -> dict[str, Any]:
    """Return the states of all random streams that a training step may draw from, by library."""
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    if device.type == "cuda":
        states["torch.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_streams(states: dict[str, Any], device: torch.device) -> None:
    """Set what :func:`read_streams` returned, maybe on another rank."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["torch.cuda"], device)


def digests(states: dict[str, Any]) -> dict[str, str]:
    """Return a short text for each state; equal states have equal ones."""

    def plain(state: Any) -> bytes:
        return bytes(state.numpy()) if isinstance(state, torch.Tensor) else pickle.dumps(state)

    return {name: hashlib.blake2b(plain(state), digest_size=12).hexdigest() for name, state in states.items()}
