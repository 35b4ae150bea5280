"""Where a run ran."""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_commopt.__about__ import __version__

__all__ = ["RankPlace", "environment", "place_of"]

_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "COMMOPT_")


class RankPlace(NamedTuple):
    """Host and device of a rank."""

    host: str
    device: str


def place_of(trainer: "pl.Trainer") -> RankPlace:
    """Say where this rank runs."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return RankPlace(platform.node(), name)


def environment(trainer: "pl.Trainer", places: Sequence[RankPlace]) -> list[tuple[str, str]]:
    """Return names and values for rank 0, and the places of all ranks."""
    hosts = list(dict.fromkeys(place.host for place in places))
    devices = list(dict.fromkeys(place.device for place in places))
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"
    variables = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    return [
        ("finished", f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"),
        ("strategy", type(trainer.strategy).__name__),
        ("ranks", f"{len(places)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"),
        ("hosts", _some(hosts)),
        ("devices", _some(devices)),
        ("CPU cores of a host", str(os.cpu_count())),
        ("torch threads a rank", str(torch.get_num_threads())),
        ("backend", backend),
        ("precision", str(trainer.precision)),
        ("batches a step", str(trainer.accumulate_grad_batches)),
        ("lightning_commopt", __version__),
        ("lightning", lightning.__version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
        ("command", " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])),
        *variables,
    ]


def _some(names: Sequence[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")
