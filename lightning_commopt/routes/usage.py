"""Which parameters a rank used since the last exchange."""

from collections.abc import Mapping
from functools import partial

from torch.nn import Parameter

__all__ = ["Usage"]


class Usage:
    """Notes the parameters to which backward gave a gradient, over all backward passes until :meth:`forget`.

    Args:
        parameters: The trainable parameters by name.

    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._used: set[str] = set()
        self._handles = [p.register_post_accumulate_grad_hook(partial(self._note, n)) for n, p in parameters.items()]

    def __contains__(self, name: str) -> bool:
        return name in self._used

    def forget(self) -> None:
        """Begin anew."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, _: Parameter) -> None:
        self._used.add(name)
