"""DDP whose buckets are final from the first backward on."""

from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["PinnedDDP"]


class PinnedDDP(DistributedDataParallel):
    """A ``DistributedDataParallel`` that never rebuilds its buckets.

    Stock DDP puts everything into one bucket in the first backward and rebuilds after it, also after a resume. A method
    with state would then start a resumed run under another layout. Here the rebuilt order (last parameter first, about
    the order in which gradients become ready) is pushed at once. With ``find_unused_parameters`` DDP itself never
    rebuilds.
    """

    def __init__(self, module: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        """Order parameters by when their gradients become ready."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # DDP reverses the buckets itself
            return parameters, sparse
        return parameters[::-1], sparse[::-1]
