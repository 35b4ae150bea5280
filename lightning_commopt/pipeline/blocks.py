"""The chain of modules between which a model may be cut."""

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_commopt.pipeline.errors import PipelineError

__all__ = ["block_index", "find_blocks"]


def find_blocks(root: nn.Module, chosen: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the blocks of a model, in the order in which they are to be called.

    Args:
        root: The whole model.
        chosen: Names of all blocks, or the name of one ``Sequential`` or ``ModuleList`` whose children they are. None
            takes the container with most parameters. A ``Sequential`` in a ``Sequential`` is taken apart.

    Raises:
        PipelineError: There is no such module, one is named twice, or one is part of another.

    """
    if chosen is None:
        container = _largest_container(root)
        return tuple(_children(container, root.get_submodule(container)))
    modules = dict(root.named_modules(remove_duplicate=False))
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    for name in names:
        if name not in modules:
            raise PipelineError(f"`blocks`: the model has no module `{name}`.")
    if isinstance(chosen, str):
        if not isinstance(modules[chosen], nn.Sequential | nn.ModuleList):
            raise PipelineError(
                f"`blocks={chosen!r}` is a `{type(modules[chosen]).__name__}`: name a `Sequential` or `ModuleList`, or "
                "list all blocks."
            )
        return tuple(_children(chosen, modules[chosen]))
    _check_disjoint(root, names)
    return tuple(names)


def block_index(blocks: Sequence[str], cut: int | str) -> int:
    """Return the place of a cut: the index of the block before which it is.

    Raises:
        PipelineError: There is no such block, or the cut is before the first one.

    """
    if isinstance(cut, str):
        if cut not in blocks:
            raise PipelineError(f"`cuts`: `{cut}` is not a block; blocks are `{blocks[0]}` to `{blocks[-1]}`.")
        cut = blocks.index(cut)
    if not 0 < cut < len(blocks):
        raise PipelineError(f"`cuts`: a cut is before one of the blocks 1 to {len(blocks) - 1}, not before {cut}.")
    return cut


def _largest_container(root: nn.Module) -> str:
    """Return the name of the container with most parameters, the outermost of equals."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in root.named_modules()
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1
    }
    if not sizes:
        raise PipelineError(
            "The model has no `Sequential` or `ModuleList` of two or more modules to cut between: name its blocks in "
            "the order of their calls with `blocks=[...]`."
        )
    largest: str = max(sizes, key=sizes.__getitem__)
    return largest


def _children(name: str, container: nn.Module) -> Iterator[str]:
    for key, child in container.named_children():
        path = f"{name}.{key}" if name else key
        if type(container) is type(child) is nn.Sequential and len(child):
            yield from _children(path, child)
        else:
            yield path


def _check_disjoint(root: nn.Module, names: Sequence[str]) -> None:
    owner: dict[int, str] = {}
    for name in names:
        for module in root.get_submodule(name).modules():
            other = owner.setdefault(id(module), name)
            if other != name:
                raise PipelineError(f"`blocks`: `{name}` and `{other}` share a module; blocks must be apart.")
    if len(set(names)) < len(names):
        raise PipelineError("`blocks`: a block is named twice.")
