"""The strategies under Ray Train, which takes only subclasses of its own ones."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from lightning_commopt.strategies.commopt import CommOptStrategy
from lightning_commopt.strategies.deepspeed import CommOptDeepSpeedStrategy

try:
    from ray.train.lightning import RayDDPStrategy, RayDeepSpeedStrategy
except ImportError as error:
    raise ImportError(
        "Strategies for Ray Train need Ray: `pip install 'lightning-commopt[ray]'`, or use `CommOptStrategy` without."
    ) from error

__all__ = ["RayCommOptDeepSpeedStrategy", "RayCommOptStrategy"]

_OF_RAY = {
    "process_group_backend": "`TorchConfig(backend=...)`",
    "timeout": "`TorchConfig(timeout_s=...)`",
    "start_method": "`ScalingConfig(num_workers=...)`",
}


class RayCommOptStrategy(CommOptStrategy, RayDDPStrategy):
    """:class:`CommOptStrategy` in a training function of Ray Train.

    Ray starts the processes and makes their process group, so that `process_group_backend`, `timeout` and
    `start_method` are given to its ``TorchTrainer``.

    Args:
        *args: As for :class:`CommOptStrategy`.
        **kwargs: Likewise.

    Raises:
        ValueError: An option is Ray's to decide; the message says where to give it.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_options_of_ray(kwargs)
        super().__init__(*args, **kwargs)
        self._checkpoint.own_folders = True

    @override
    def setup_environment(self) -> None:
        self._timeout = _timeout_of_group(self)
        super().setup_environment()


class RayCommOptDeepSpeedStrategy(CommOptDeepSpeedStrategy, RayDeepSpeedStrategy):
    """:class:`CommOptDeepSpeedStrategy` in a training function of Ray Train, as :class:`RayCommOptStrategy` is.

    Args:
        *args: As for :class:`CommOptDeepSpeedStrategy`.
        **kwargs: Likewise.

    Raises:
        ValueError: An option is Ray's to decide; the message says where to give it.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_options_of_ray(kwargs)
        super().__init__(*args, **kwargs)

    @override
    def setup_environment(self) -> None:
        self._timeout = _timeout_of_group(self)
        super().setup_environment()


def _refuse_options_of_ray(options: Mapping[str, Any]) -> None:
    for name, place in _OF_RAY.items():
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}={options[name]!r}` cannot be honoured: Ray Train starts the processes and makes their "
                f"process group. Give it to the `TorchTrainer`, as {place}."
            )


def _timeout_of_group(strategy: ParallelStrategy) -> timedelta:
    """Return the timeout of the process group that Ray made, for the groups that we add.

    Raises:
        RuntimeError: There is no such group: this is no worker of a `TorchTrainer` of several workers.

    """
    if not dist.is_initialized():
        raise RuntimeError(
            "Ray Train made no process group: run the Trainer in the training function of a `TorchTrainer`, or use the "
            "strategy without Ray in its name elsewhere."
        )
    backend = dist.distributed_c10d._get_default_group()._get_backend(strategy.root_device)
    timeout: timedelta = backend.options._timeout
    return timeout
