"""Runs the documented script of Ray Train on a small local cluster, and fits again in its workers: auto, DeepSpeed."""

import os
import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import ray.train.torch
from lightning.pytorch import Callback
from ray.train.torch import TorchTrainer

import lightning_commopt
from lightning_commopt.strategies import residual_checkpoint


def on_this_machine_only() -> None:
    """Start a cluster that talks to nobody else, with room for two workers and hardly any objects."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["COMMOPT_TEST_RAY"],
    )


def several(train: Callable[[dict[str, Any]], None], **options: Any) -> TorchTrainer:
    """The same workers for further fits: their start takes most of the time."""

    def fits(config: dict[str, Any]) -> None:
        vars(residual_checkpoint)["_INLINE_BYTES"] = 0  # so that residuals are files
        train(config)
        train(config | {"compression": "auto"})
        train.__globals__["RayCommOptStrategy"] = partial(lightning_commopt.RayCommOptDeepSpeedStrategy, 2)
        train.__globals__["RayTrainReportCallback"] = Callback  # a checkpoint of DeepSpeed is a folder
        train(config)

    return TorchTrainer(fits, **options)


if __name__ == "__main__":
    on_this_machine_only()
    vars(ray.train.torch)["TorchTrainer"] = several
    runpy.run_path("train_ray.py", run_name="__main__")
    ray.shutdown()
