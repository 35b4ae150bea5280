"""Which parameters a rank used since the last exchange."""

from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["Usage"]


class Usage:
    """Notes the parameters to which backward gave a gradient, over all backward passes until :meth:`forget`.

    Args:
        parameters: The trainable parameters by name.

    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._used: set[str] = set()
        self._handles: dict[str, tuple[Tensor, RemovableHandle]] = {}
        self.follow(parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._used

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Go on with other trainable parameters; what was noted stays."""
        for name in list(self._handles):
            if self._handles[name][0] is not parameters.get(name):
                self._handles.pop(name)[1].remove()
        for name, parameter in parameters.items():
            if name not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(partial(self._note, name))
                self._handles[name] = parameter, handle

    def note(self, names: Iterable[str]) -> None:
        """Count parameters as used."""
        self._used.update(names)

    def forget(self) -> None:
        """Begin anew."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self.follow({})

    def _note(self, name: str, _: Tensor) -> None:
        self._used.add(name)
