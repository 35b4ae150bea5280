"""Runs the documented script of Ray Train on a small local cluster, and fits again with `auto` in its workers."""

import os
import runpy
from collections.abc import Callable
from typing import Any

import ray
import ray.train.torch
from ray.train.torch import TorchTrainer


def on_this_machine_only() -> None:
    """Start a cluster that talks to nobody else, with room for two workers and hardly any objects."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["COMMOPT_TEST_RAY"],
    )


def both(train: Callable[[dict[str, Any]], None], **options: Any) -> TorchTrainer:
    """The same workers for a further fit: their start takes most of the time."""

    def twice(config: dict[str, Any]) -> None:
        train(config)
        train(config | {"compression": "auto"})

    return TorchTrainer(twice, **options)


if __name__ == "__main__":
    on_this_machine_only()
    vars(ray.train.torch)["TorchTrainer"] = both
    runpy.run_path("train_ray.py", run_name="__main__")
    ray.shutdown()
