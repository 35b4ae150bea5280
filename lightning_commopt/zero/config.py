"""One DeepSpeed configuration from the strategy's arguments, the user's own, and the Trainer's values."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TrainerValues", "add_zero_plus_plus", "merged", "take_trainer_values"]

_PRECISIONS = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}


@dataclass(frozen=True)
class TrainerValues:
    """What the Trainer owns.

    Args:
        accumulation: ``accumulate_grad_batches``.
        clipping: ``gradient_clip_val``, 0 for none.
        precision: ``precision``.
        batch_size: Of one rank's loader; None where it is not known.
        world: Number of ranks.

    """

    accumulation: int
    clipping: float
    precision: str
    batch_size: int | None
    world: int


def merged(arguments: Mapping[str, Any], user: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's configuration over that of the strategy's arguments.

    Args:
        arguments: As Lightning makes it from its arguments, most of which are defaults.
        user: The user's.
        given: The arguments that the user gave; each may say the same as the configuration, or alone.

    Raises:
        ValueError: Both say different things.

    """
    result = copy.deepcopy(dict(arguments))
    zero = user.get("zero_optimization", {})
    for name, value in given.items():
        key = "offload_param" if name == "offload_parameters" else name
        theirs = zero.get(key, user.get(key, value))
        theirs = bool(theirs) if key.startswith("offload_") and isinstance(theirs, Mapping) else theirs
        if theirs != value:
            raise ValueError(
                f"`{name}={value!r}` and the DeepSpeed config, which says {theirs!r}: leave one of them out."
            )
    for key, value in user.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = {**result[key], **copy.deepcopy(value)} if nested else copy.deepcopy(value)
    return result


def add_zero_plus_plus(zero: dict[str, Any], ranks_per_node: int, nodes: int) -> None:
    """Write into a ``zero_optimization`` section what ZeRO++ is, where it says nothing itself.

    Weights are quantised where they are gathered, gradients where they are reduced between nodes. Where there are
    several nodes, each keeps a second copy of the weights (hpZ), so that backward gathers them inside it; not beside
    offloaded parameters, with which DeepSpeed cannot do that.

    Args:
        zero: The section.
        ranks_per_node: Ranks on each node.
        nodes: Number of nodes.

    """
    zero.setdefault("zero_quantized_weights", True)
    zero.setdefault("zero_quantized_gradients", True)
    if nodes > 1 and not zero.get("offload_param"):
        zero.setdefault("zero_hpz_partition_size", ranks_per_node)


def take_trainer_values(config: dict[str, Any], trainer: TrainerValues) -> None:
    """Take out of a configuration what the Trainer owns, to be filled in from there.

    Raises:
        ValueError: It says something else than the Trainer; with both numbers, and what to do.

    """
    owned = {
        "gradient_accumulation_steps": ("accumulate_grad_batches", trainer.accumulation),
        "gradient_clipping": ("gradient_clip_val", trainer.clipping),
    }
    for key, (argument, value) in owned.items():
        theirs = config.pop(key, "auto")
        if theirs not in ("auto", value):
            raise ValueError(
                f"`{key}={theirs!r}` in the DeepSpeed config, and `Trainer({argument}={value!r})`: the Trainer owns "
                f"it. Take it out of the config, or set `Trainer({argument}={theirs!r})`."
            )
    _take_batch_sizes(config, trainer)
    for key, names in _PRECISIONS.items():
        wanted, block = trainer.precision in names, config.get(key)
        if block is None:
            continue
        if block.get("enabled", "auto") not in ("auto", wanted):
            raise ValueError(
                f"`{key}.enabled={block['enabled']!r}` in the DeepSpeed config, and `Trainer(precision="
                f"{trainer.precision!r})`: the Trainer owns it. Take it out of the config, or set "
                f"`Trainer(precision={names[0] if block['enabled'] else '32-true'!r})`."
            )
        block["enabled"] = wanted


def _take_batch_sizes(config: dict[str, Any], trainer: TrainerValues) -> None:
    """Take out batch sizes, of which DeepSpeed needs one, for its log."""
    size = trainer.batch_size
    total = None if size is None else size * trainer.accumulation * trainer.world
    for key, value in {"train_micro_batch_size_per_gpu": size, "train_batch_size": total}.items():
        theirs = config.pop(key, "auto")
        if theirs != "auto" and value is not None and theirs != value:
            raise ValueError(
                f"`{key}={theirs!r}` in the DeepSpeed config, and the data loader's batch size, accumulation and ranks "
                f"make {value}: they own it. Take it out of the config."
            )
