"""Repeats recorded steps on copies, with the batches of all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_commopt.callbacks.doctor.check import Run, loss_of
from lightning_commopt.callbacks.doctor.random_streams import set_streams

__all__ = ["MicroBatch", "RecordedStep", "Replay"]

_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


@dataclass
class MicroBatch:
    """One batch of one rank.

    Args:
        data: A copy on the CPU, as `training_step` got it.
        index: Its number in the epoch.
        streams: The random streams before it.

    """

    data: Any
    index: int
    streams: dict[str, Any]

    @classmethod
    def of(cls, batch: Any, index: int, streams: dict[str, Any]) -> "MicroBatch":
        """Copy a batch."""
        return cls(apply_to_collection(batch, Tensor, lambda t: t.detach().clone().cpu()), index, streams)


@dataclass
class RecordedStep:
    """One optimizer step of one rank.

    Args:
        batches: Those that it accumulates.
        ended: How many of them have ended.
        losses: Of each, 0-d.
        options: Hyperparameters of each parameter group as they were used.
        divisor: By what the sum of the batches' gradients is divided.

    """

    batches: list[MicroBatch] = field(default_factory=list)
    ended: int = 0
    losses: list[Tensor] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    divisor: int = 1

    def note_options(self, optimizer: Optimizer) -> None:
        """Keep what schedulers and callbacks have set for this step."""
        self.options = [
            {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]


class Replay:
    """One process's training with all ranks' batches, on every rank alike.

    Args:
        run: The fit.
        module: A copy of the module from before the first step; it is trained.
        optimizer: A copy of its optimizer, over the copy's parameters.

    """

    def __init__(self, run: Run, module: Any, optimizer: Optimizer) -> None:
        self._run = run
        self._module = module
        self._optimizer = optimizer
        self._device = run.trainer.strategy.root_device
        self._originals = {id(parameter) for parameter in run.module.parameters()}
        self._checked = False
        if run.module._compiler_ctx is not None:  # compiled steps are those of the original
            for name in _COMPILED:
                module.__dict__.pop(name, None)
        module.trainer = run.trainer
        for name in ("log", "log_dict"):
            setattr(module, name, _log_nothing)

    def losses(self, steps: list[RecordedStep]) -> tuple[list[float], str]:
        """Return the mean loss of each step, and what went wrong, if anything. A collective; it sets random streams."""
        losses: list[float] = []
        mine = ""
        for step in steps:
            everyone = self._run.all_gather((mine, step.batches))
            errors = [error for error, _ in everyone if error]
            if errors:
                return losses, errors[0]
            try:
                losses.append(self._step(step, [batches for _, batches in everyone]))
            except Exception as error:  # it runs the user's code
                mine = f"{type(error).__name__}: {error}"
        errors = [error for error in self._run.all_gather(mine) if error]
        return losses, next(iter(errors), "")

    def _step(self, step: RecordedStep, everyone: list[list[MicroBatch]]) -> float:
        """Take one optimizer step; return the mean loss."""
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        for batches in zip(*everyone, strict=True):
            for batch in batches:
                loss = self._loss(batch)
                (loss / (step.divisor * len(everyone))).backward()
                losses.append(loss.detach().float())
        for group, options in zip(self._optimizer.param_groups, step.options, strict=True):
            group.update(options)
        trainer = self._run.trainer
        self._module.configure_gradient_clipping(
            self._optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        self._optimizer.step()
        return float(torch.stack(losses).mean())

    def _loss(self, batch: MicroBatch) -> Tensor:
        set_streams(batch.streams, self._device)
        module = self._module
        arguments = [move_data_to_device(batch.data, self._device)]
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            arguments.append(batch.index)
        with self._run.trainer.precision_plugin.train_step_context():
            outputs = module.training_step(*arguments)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss_of(loss) is None:
            raise ValueError("`training_step` returned no loss")
        assert isinstance(loss, Tensor)
        if not self._checked:
            self._checked = True
            if self._originals & set(_leaves(loss)):
                raise ValueError(
                    "the copy of the module computes with parameters of the original, through a function that the "
                    "module keeps in an attribute (a lambda, or a compiled function): make it a method"
                )
        return loss


def _leaves(loss: Tensor) -> Iterator[int]:
    """Yield the identities of the tensors that a loss has gradients for."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield id(node.variable)
        waiting += [following for following, _ in node.next_functions]


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `self.log`."""
