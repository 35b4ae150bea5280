"""References to parameters as they were before sharding, which replaces them: a loss that uses them trains nothing."""

import gc
import weakref
from collections.abc import Iterator

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

__all__ = ["OldReferences"]


class OldReferences:
    """Remembers the parameters of a module that is to be sharded, without keeping them alive.

    Args:
        module: Not sharded yet.

    """

    def __init__(self, module: nn.Module) -> None:
        passing = set(_recomputed(module))
        self._module = module
        self._parameters = [(n, weakref.ref(p)) for n, p in module.named_parameters() if n not in passing]

    def warn(self) -> None:
        """Name the parameters that something still refers to, after sharding."""
        gc.collect()
        alive = {name: old for name, ref in self._parameters if (old := ref()) is not None}
        if not alive:
            return
        more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        place = next(_places(self._module, {id(old) for old in alive.values()}), "")
        where = f", such as `{place}`," if place else ""
        rank_zero_warn(
            f"Something{where} still refers to `{next(iter(alive))}`{more} as before sharding, which replaces "
            "parameters. In a loss, that has old values and trains nothing: take parameters from their modules in the "
            "step (`self.layer.weight`)."
        )


def _recomputed(module: nn.Module) -> Iterator[str]:
    """Yield the parameters that old `weight_norm` refers to by the weight it made of them, until the next forward."""
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if type(hook).__name__ == "WeightNorm":
                of = f"{name}.{hook.name}".lstrip(".")
                yield from (f"{of}_g", f"{of}_v")


def _places(module: nn.Module, old: set[int]) -> Iterator[str]:
    """Yield the attributes of modules that are, or contain, one of these tensors."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in ("_parameters", "_modules", "_buffers") and _contains(value, old, depth=3):
                yield f"{name}.{attribute}".lstrip(".")


def _contains(value: object, old: set[int], depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in old
    if isinstance(value, dict):
        value = list(value.values())
    return depth > 0 and isinstance(value, list | tuple | set) and any(_contains(v, old, depth - 1) for v in value)
