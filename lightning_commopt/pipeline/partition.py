"""Taking a model apart, so that a rank holds its stages alone, and putting it together again."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_commopt.pipeline.plan import Plan, block_of_parameters
from lightning_commopt.pipeline.slicing import Absent, Position
from lightning_commopt.pipeline.trace import Shape

__all__ = ["Partition"]


class Partition:
    """The stages of one rank in a model.

    Blocks of other ranks leave first (:meth:`place_blocks`), parameters outside of blocks when it is known which stages
    need them (:meth:`place_parameters`). The parameters stay the same objects; those of other ranks are empty.

    Args:
        module: The whole model, on the CPU.
        position: Where the running stage is.
        stages: Those of this rank.

    """

    def __init__(self, module: nn.Module, position: Position, stages: Sequence[int]) -> None:
        self._module, self._position, self.stages = module, position, frozenset(stages)
        self.plan: Plan = position.plan
        named = dict(module.named_parameters(remove_duplicate=False))
        self.parameters = named
        self.shapes = {name: Shape.of(p) for name, p in named.items()}
        self.state_keys = tuple(module.state_dict())
        self.owners: dict[str, tuple[int, ...]] = {}
        self._in_block = block_of_parameters(module, self.plan.blocks)
        self._blocks = [module.get_submodule(name) for name in self.plan.blocks]
        self._absent: dict[int, Absent] = {}
        self._dummies: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
        self._undo: list[Callable[[], object]] = []

    @property
    def dummies(self) -> tuple[str, ...]:
        """Names of parameters that are not on this rank, but whose places are."""
        return tuple(self._dummies)

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, a tied one by its first name."""
        seen: set[int] = set()
        owned = {}
        for name, parameter in self.parameters.items():
            if self.stages & set(self.owners[name]) and id(parameter) not in seen:
                seen.add(id(parameter))
                owned[name] = parameter
        return owned

    @property
    def first_names(self) -> dict[int, str]:
        """The first name of each parameter of the whole model, by identity."""
        return {id(p): name for name, p in reversed(list(self.parameters.items()))}

    def plan_stage(self, name: str) -> int:
        """Return the stage whose values of a parameter count, the first of those that need it."""
        if name in self.owners:
            return self.owners[name][0]
        return self.plan.stage_of(self._in_block.get(name, 0))

    def place_blocks(self, device: torch.device) -> None:
        """Put stubs in the place of other ranks' blocks, and move what stays to the device."""
        here = {i for i in range(len(self._blocks)) if self.plan.stage_of(i) in self.stages}
        kept = {id(p) for i in here for p in self._blocks[i].parameters()}
        outside = self._outside_of_blocks()
        for index, block in enumerate(self._blocks):
            if index in here:
                self._guard(index, block)
                continue
            self._absent[index] = Absent(block, index, self._position)
            for parameter in block.parameters():
                if id(parameter) not in kept and id(parameter) not in outside:
                    _empty(parameter)
        self._set_blocks(self._absent)
        self._module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

    def place_parameters(self, owners: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Let go of parameters outside of blocks that no stage of this rank needs.

        Args:
            owners: The stages that need each parameter, by name.
            device: Where this rank computes.

        """
        self.owners = dict(owners)
        for path, module in self._module.named_modules():
            for key, parameter in list(module._parameters.items()):
                name = f"{path}.{key}" if path else key
                if parameter is not None and not self.stages & set(owners[name]):
                    dummy = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
                    module._parameters[key] = nn.Parameter(dummy.expand(parameter.shape), requires_grad=False)
                    self._dummies[name] = (module, key, parameter)
        for _, _, parameter in self._dummies.values():
            _empty(parameter)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Put the whole model together for a trace; parameters of other ranks are empty."""
        run, self._position.run = self._position.run, None
        for index, stub in self._absent.items():
            self._blocks[index].train(stub.training)
        dummies = {name: module._parameters[key] for name, (module, key, _) in self._dummies.items()}
        self._set_blocks(dict(enumerate(self._blocks)))
        for module, key, parameter in self._dummies.values():
            module._parameters[key] = parameter
        try:
            yield
        finally:
            for name, (module, key, _) in self._dummies.items():
                module._parameters[key] = dummies[name]
            self._set_blocks(self._absent)
            self._position.run = run

    def restore(self, value_of: Callable[[str, nn.Parameter], Tensor]) -> None:
        """Put the model together for good.

        Args:
            value_of: Gives the values of a parameter; it is called once for each, in the same order on all ranks.

        """
        for undo in self._undo:
            undo()
        for index, stub in self._absent.items():
            self._blocks[index].train(stub.training)
        self._set_blocks(dict(enumerate(self._blocks)))
        for module, key, parameter in self._dummies.values():
            module._parameters[key] = parameter
        self._dummies = {}
        done: set[int] = set()
        for name, parameter in self.parameters.items():
            if id(parameter) not in done:
                done.add(id(parameter))
                parameter.grad = None
                parameter.data = value_of(name, parameter)
        self._absent, self._undo = {}, []

    def _outside_of_blocks(self) -> set[int]:
        """Identities of parameters that also belong to a module outside of blocks."""
        inside = {id(module) for block in self._blocks for module in block.modules()}
        return {
            id(p)
            for module in self._module.modules()
            if id(module) not in inside
            for p in module._parameters.values()
            if p is not None
        }

    def _guard(self, index: int, block: nn.Module) -> None:
        """Let a block of this rank run in its own stage alone."""
        forward = block.forward

        def guarded(*args: object, **kwargs: object) -> object:
            runs_here, result = self._position.call(index, args, kwargs)
            if not runs_here:
                return result
            args, kwargs = result
            return forward(*args, **kwargs)

        had = block.__dict__.get("forward")
        block.forward = guarded
        self._undo.append(lambda: block.__dict__.pop("forward") if had is None else block.__dict__.update(forward=had))

    def _set_blocks(self, blocks: Mapping[int, nn.Module]) -> None:
        for index, block in blocks.items():
            parent, _, key = self.plan.blocks[index].rpartition(".")
            self._parent(parent)._modules[key] = block

    def _parent(self, name: str) -> nn.Module:
        """Find a module by name, whatever stands in its place now."""
        module = self._module
        for key in filter(None, name.split(".")):
            child = module._modules[key]
            assert child is not None
            module = child
        return module


def _empty(parameter: nn.Parameter) -> None:
    """Free the values of a parameter."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
