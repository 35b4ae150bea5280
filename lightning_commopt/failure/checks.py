"""What would leave the other ranks waiting without a word, turned into an error where it begins."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Reached", "check_output"]


def check_output(output: Any, module: "pl.LightningModule") -> None:
    """Check what `training_step` returned under automatic optimisation in a run of several ranks.

    Raises:
        RuntimeError: It is None, or a loss from which no gradient flows.

    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    where = f"`training_step` on rank {module.global_rank} at step {module.global_step}"
    if output is None:
        raise RuntimeError(
            f"{where} returned `None`. Skipping a batch on one rank is not supported in distributed training: the "
            "others would wait for its gradients. Return a loss multiplied by zero instead."
        )
    if isinstance(loss, Tensor) and not loss.requires_grad and not is_overridden("backward", module):
        raise RuntimeError(
            f"{where} returned a loss that does not require a gradient. The other ranks would wait for this one's: "
            "return a loss that depends on the parameters, multiplied by zero where a batch is to be skipped."
        )


class Reached:
    """Sees whether a backward got to the parameters, where DDP's own reducer waits for them.

    DDP without `find_unused_parameters` waits for all of them, so one tells enough. With it there is no cheap way to
    know, and a loss that depends on none is found by the limit on waiting.

    Args:
        ddp: The wrapped module.

    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._name, self._parameter = next(
            (name, p)
            for name, p in ddp.module.named_parameters()
            if p.requires_grad and name not in ddp.parameters_to_ignore
        )
        self._seen = False
        self._handle = self._parameter.register_post_accumulate_grad_hook(self._see)

    def _see(self, parameter: Tensor) -> None:
        self._seen = True

    def begin(self) -> None:
        """Prepare for a synchronising backward."""
        self._seen = False

    def check(self, module: "pl.LightningModule") -> None:
        """Check what the backward left behind.

        Raises:
            RuntimeError: It did not reach the parameter.

        """
        if self._seen or not self._parameter.requires_grad:
            return
        raise RuntimeError(
            f"The loss on rank {module.global_rank} at step {module.global_step} does not depend on `{self._name}`, "
            "and DDP waits for its gradient: where a batch may leave parameters unused, set "
            "`find_unused_parameters=True`."
        )

    def close(self) -> None:
        """Let go of the parameter."""
        self._handle.remove()
