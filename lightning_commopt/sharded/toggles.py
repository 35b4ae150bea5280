"""What trains, changed inside a step: FSDP2 copies `requires_grad` to gathered parameters only when it gathers them."""

from collections.abc import Collection
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_commopt.sharded.parameters import ShardedParameter

__all__ = ["Toggles"]

_METHODS = ("toggle_optimizer", "untoggle_optimizer")


class Toggles:
    """Lets `toggle_optimizer` of a module reach the gathered parameters that the step at hand uses.

    Args:
        module: The LightningModule, with manual optimisation.
        parameters: All of its sharded ones.

    """

    def __init__(self, module: "pl.LightningModule", parameters: Collection[ShardedParameter]) -> None:
        self._module, self._parameters = module, parameters
        for name in _METHODS:
            vars(module)[name] = partial(self._toggle, getattr(type(module), name))

    def follow_step(self) -> None:
        """Let shards be trained as the step has set their gathered parameters."""
        for parameter in self._parameters:
            parameter.flag_from_step()

    def detach(self) -> None:
        """Give the module its own methods back."""
        for name in _METHODS:
            vars(self._module).pop(name, None)

    def _toggle(self, own: Any, *args: Any, **kwargs: Any) -> None:
        self.follow_step()
        own(self._module, *args, **kwargs)
        for parameter in self._parameters:
            parameter.flag_to_step()
