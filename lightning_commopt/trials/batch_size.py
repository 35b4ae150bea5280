"""The largest batch of one device."""

import tempfile
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.tuner import Tuner

from lightning_commopt.trials.faults import told
from lightning_commopt.trials.one_process import alone, with_batch_size
from lightning_commopt.trials.target import Target

__all__ = ["LargestBatch", "largest_batch"]

_STEPS = 3  # of each size: memory grows until optimizer state and caches are there


@dataclass(frozen=True)
class LargestBatch:
    """What the search came to.

    Args:
        size: Samples that were trained with on one device.
        limit: What ended the search.
        samples: In the data; None where they have no length.
        on_cpu: Whether nothing could have ended it but time.
        gradient_bytes: Of the parameters that are trained: what DDP's buckets will take besides.

    """

    size: int
    limit: Literal["memory", "data", "most"]
    samples: int | None
    on_cpu: bool
    gradient_bytes: int


def largest_batch(target: Target, name: str, most: int, ranks: int) -> LargestBatch:
    """Double the batch in one process until memory, data or ``most`` end it, by Lightning's ``scale_batch_size``.

    Args:
        target: Makes Trainer and model.
        name: Attribute or hyperparameter that holds the size.
        most: Samples of the largest batch to try, rounded down to a power of 2.
        ranks: That will share the data: none gets more than its part.

    Raises:
        TargetError: Nothing holds the size.
        ScriptError: The user's code raised an exception.

    """
    with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
        setup = with_batch_size(alone(target, folder, {"max_epochs": -1, "max_steps": 1000}), name, None)
        # The number of trials bounds the search: at `max_val` Lightning returns a size that it never tried.
        with told("training"):
            found = Tuner(setup.trainer).scale_batch_size(
                setup.model,
                **setup.data_arguments(),
                mode="power",
                steps_per_trial=_STEPS,
                init_val=1,
                max_trials=most.bit_length(),
                batch_arg_name=name,
                max_val=2 * most,
            )
        assert found is not None
        samples = _samples(setup.trainer.train_dataloader)
    size = found if samples is None else min(found, 1 << max(samples // ranks, 1).bit_length() - 1)
    by_data = samples is not None and (found >= samples or size < found)
    return LargestBatch(
        size=size,
        limit="data" if by_data else "most" if found >= 1 << most.bit_length() - 1 else "memory",
        samples=samples,
        on_cpu=setup.trainer.strategy.root_device.type == "cpu",
        gradient_bytes=sum(p.numel() * p.element_size() for p in setup.model.parameters() if p.requires_grad),
    )


def _samples(loader: object) -> int | None:
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None
