"""Which codecs may be used inside a node, and on what."""

from collections.abc import Iterable

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_commopt.compression import BF16, Compression, Int4, Int8, method_named
from lightning_commopt.sharded.parameters import ShardGroup

__all__ = ["GATHER", "SCATTER", "check_inside", "codec_inside"]

GATHER: tuple[type[Compression], ...] = (BF16, Int8)
"""What parameters may be encoded with."""
SCATTER: tuple[type[Compression], ...] = (BF16, Int8, Int4)
"""What gradients may be encoded with on the way to the rank that keeps their shard."""


def codec_inside(
    option: str, value: Compression | str | None, kinds: tuple[type[Compression], ...]
) -> Compression | None:
    """Return the codec that an option names.

    Args:
        option: Its name.
        value: A word, options of a method, or None for no codec.
        kinds: What is possible.

    Raises:
        TypeError: The value is of another type.
        ValueError: It is another method.

    """
    words = ", ".join(f"'{kind.name}'" for kind in kinds)
    if value is None:
        return None
    if isinstance(value, str):
        if value not in {kind.name for kind in kinds}:
            raise ValueError(f"`{option}={value!r}` must be one of {words}, or None for FSDP2's own collectives.")
        return method_named(value)
    if not isinstance(value, Compression):
        raise TypeError(f"`{option}={value!r}` must be one of {words}, a method with its options, or None.")
    if not isinstance(value, kinds):
        raise ValueError(f"`{option}={value!r}`: choose one of {words}, or None for FSDP2's own collectives.")
    return value


def check_inside(groups: Iterable[ShardGroup], gather: Compression | None, scatter: Compression | None) -> None:
    """Refuse groups whose collectives a codec cannot replace.

    Raises:
        RuntimeError: This torch lets nobody replace them.
        ValueError: Naming a parameter of the group, and what to do instead.

    """
    wider = False
    for group in groups:
        managed, name = group.managed, group.parameters[0].name
        for option, codec, attribute in (
            ("shard_gather", gather, "_all_gather_comm"),
            ("shard_scatter", scatter, "_reduce_scatter_comm"),
        ):
            if codec is None:
                continue
            if not hasattr(managed, attribute):
                raise RuntimeError(
                    f"`{option}` needs a torch whose FSDP2 has `set_custom_all_gather`, and this is "
                    f"{torch.__version__}: leave it out."
                )
            kind = type(getattr(managed, attribute))
            if not kind.__name__.startswith("Default"):
                raise ValueError(
                    f"`{option}`: the group with `{name}` has a collective of its own, `{kind.__name__}`. Leave "
                    f"`{option}` out, or the call that set it."
                )
        if gather is not None:
            encoded = any(not p.travels_exactly(gather) for p in group.parameters)
            wider = (_check_gather(group) > 2 and encoded) or wider
        if scatter is not None and managed.gradient_divide_factor is not None:
            raise ValueError(
                f"`shard_scatter` takes means, and the group with `{name}` has a gradient divide factor: leave "
                "`set_gradient_divide_factor` out."
            )
    if isinstance(gather, BF16) and not wider:
        raise ValueError(
            "`shard_gather='bf16'` has no effect, since parameters are gathered in 16 bits already: choose 'int8', or "
            "leave it out."
        )


def _check_gather(group: ShardGroup) -> int:
    """Return the bytes of an element that FSDP2 gathers."""
    managed, name = group.managed, group.parameters[0].name
    policy: MixedPrecisionPolicy = managed.mp_policy
    types = {policy.param_dtype or p.dtype for p in group.parameters}
    if len(types) > 1 or not (one := next(iter(types))).is_floating_point:
        raise ValueError(
            f"`shard_gather`: parameters of the group with `{name}` are gathered in several types "
            f"({', '.join(sorted(map(str, types)))}). Give them one, or shard them as groups of their own."
        )
    if any(p.extended for p in group.parameters):
        raise ValueError(
            f"`shard_gather`: a parameter of the group with `{name}` encodes itself for the all-gather "
            "(`fsdp_pre_all_gather`). Leave `shard_gather` out."
        )
    after = managed.post_forward_mesh_info
    if after is not None and after is not managed.mesh_info:
        raise ValueError(
            f"`shard_gather`: the group with `{name}` is sharded over fewer ranks after forward. Leave "
            "`reshard_after_forward` a bool, or `shard_gather` out."
        )
    return one.itemsize
