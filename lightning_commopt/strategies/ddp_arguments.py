"""The arguments that go on to torch's DistributedDataParallel."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["chosen_ddp_arguments"]


def chosen_ddp_arguments(arguments: Mapping[str, Any], own: type) -> dict[str, Any]:
    """Return the arguments that differ from DDP's defaults: LightningCLI passes all of them, a script only some.

    Args:
        arguments: By name.
        own: The class that was given them.

    Raises:
        TypeError: DDP has no such argument.

    """
    accepted = dict(inspect.signature(DistributedDataParallel).parameters)
    for taken in ("module", "device_ids"):
        del accepted[taken]
    for name in arguments:
        if name not in accepted:
            close = get_close_matches(name, [*inspect.signature(own).parameters, *accepted], n=1)
            hint = f": did you mean `{close[0]}`?" if close else ", nor has `DistributedDataParallel`."
            raise TypeError(f"`{own.__name__}` has no argument `{name}`{hint}")
    return {name: value for name, value in arguments.items() if value != accepted[name].default}
