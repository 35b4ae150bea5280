"""What DeepSpeed would ignore or crash on, said in one sentence before launch."""

import difflib
from collections.abc import Mapping
from typing import Any

from torch.nn import Embedding, EmbeddingBag, Module

from lightning_commopt.compression import METHODS, Compression, Uncompressed, method_named

__all__ = [
    "check_config",
    "check_device",
    "check_method",
    "check_module",
    "check_options",
    "check_precision",
    "check_version",
]

_METHODS = ("none", "bf16", "fp16", "int8", "int4", "onebit")
_TESTED = "0.19"
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
_ZERO_PLUS_PLUS = ("zero_quantized_gradients", "zero_quantized_weights")
_REMOVED_IN_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
_REMOVED = (
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
)
_KNOWN = (
    *("activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger"),
    *("communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last"),
    *("datastates_config", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler"),
    *("fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping"),
    *("gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown"),
    *("monitor_config", "optimizer", "pipeline", "prescale_gradients", "scheduler"),
    *("seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel"),
    *("tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
)
_ONE_BIT_IS_GONE = (
    "DeepSpeed removed its 1-bit optimizers (`OneBitAdam`, `OneBitLamb`, `ZeroOneAdam`) after 0.19.6, and they never "
    "worked with ZeRO: set `compression='onebit'`, which is our own, and return an optimizer of torch from "
    "`configure_optimizers`."
)


def check_method(compression: "Compression | str") -> tuple[Compression, bool]:
    """Return the method that a user means, and whether it is DeepSpeed's own ZeRO++.

    Raises:
        ValueError: It cannot be used here; the message says what can.

    """
    if compression == "zero++":
        return Uncompressed(), True
    if isinstance(compression, str) and compression.lower().replace("/", "").replace("-", "") in (
        *_ONE_BIT,
        *("1bit", "1bitadam", "1bitlamb", "01adam"),
    ):
        raise ValueError(f"`compression={compression!r}`: {_ONE_BIT_IS_GONE}")
    known = ", ".join(map(repr, (*_METHODS, "zero++")))
    if isinstance(compression, str) and compression not in METHODS:
        raise ValueError(f"`compression={compression!r}` is not a method under DeepSpeed. Choose one of {known}.")
    method = method_named(compression)
    if method.name not in _METHODS:
        raise ValueError(
            f"`compression={compression!r}` cannot be used under DeepSpeed, whose buffers hold parts of parameters: "
            f"choose one of {known}, or `CommOptStrategy` where the model fits on one device."
        )
    return method, False


def check_version(method: Compression, version: str) -> None:
    """Refuse versions of DeepSpeed whose gradients the method may not find.

    Raises:
        ValueError: Saying what to install.

    """
    if not isinstance(method, Uncompressed) and version.split(".")[:2] != _TESTED.split("."):
        raise ValueError(
            f"Method `{method.name}` reaches gradients by parts of DeepSpeed that are not public, and is tested with "
            f"{_TESTED}; {version} is installed: install 'deepspeed=={_TESTED}.*', or choose `compression='none'`."
        )


def check_config(config: Mapping[str, Any], method: Compression, zero_plus_plus: bool) -> None:
    """Refuse a merged configuration that DeepSpeed would not do as it says.

    Args:
        config: The user's over the arguments'.
        method: Of compression.
        zero_plus_plus: Whether DeepSpeed's own quantisation was asked for.

    Raises:
        ValueError: Saying what to do instead.

    """
    _check_keys(config)
    zero = config["zero_optimization"]
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ValueError(f"`stage={stage!r}` must be 0, 1, 2 or 3.")
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type", "")).lower() in _ONE_BIT:
        raise ValueError(f"`optimizer.type={optimizer['type']!r}` in the DeepSpeed config: {_ONE_BIT_IS_GONE}")
    hpz = zero.get("zero_hpz_partition_size", 1)
    if stage < 3:
        if zero_plus_plus:
            raise ValueError("`compression='zero++'` needs `stage=3`: DeepSpeed ignores it below without a word.")
        for key in (*_ZERO_PLUS_PLUS, *(["zero_hpz_partition_size"] if hpz > 1 else [])):
            if zero.get(key):
                raise ValueError(f"`{key}` has an effect at stage 3 only, DeepSpeed ignores it below: set `stage=3`.")
        if zero.get("offload_param"):
            raise ValueError("`offload_parameters` needs `stage=3`: below it parameters are not partitioned.")
        if stage == 0 and zero.get("offload_optimizer"):
            raise ValueError("`offload_optimizer` needs `stage=1`, 2 or 3: without ZeRO DeepSpeed ignores it.")
    if hpz > 1 and zero.get("offload_param"):
        raise ValueError(
            "`zero_hpz_partition_size` keeps a second copy of the parameters on the device, and `offload_param` takes "
            "them off it: DeepSpeed cannot do both. Leave one of them out."
        )
    if not isinstance(method, Uncompressed):
        _check_own_codec(config, method, stage)


def _check_keys(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed has no longer, and what it would not read."""
    for key in config:
        if key in _REMOVED:
            raise ValueError(f"`{key}` in the DeepSpeed config: DeepSpeed has removed that feature. Leave it out.")
        if key not in _KNOWN:
            close = difflib.get_close_matches(key, _KNOWN, 1)
            hint = f"did you mean `{close[0]}`?" if close else "leave it out."
            raise ValueError(f"`{key}` is no key of a DeepSpeed config, which would ignore it without a word: {hint}")
    for key in _REMOVED_IN_ZERO:
        if key in config["zero_optimization"]:
            raise ValueError(
                f"`zero_optimization.{key}`: DeepSpeed removed MiCS and LoCo after 0.19.6. Leave it out; with "
                "`compression='int4'` a residual does what LoCo did."
            )


def _check_own_codec(config: Mapping[str, Any], method: Compression, stage: int) -> None:
    """Refuse ways of reduction that our codec would not see, or that would be done besides."""
    zero, word = config["zero_optimization"], f"`compression={method.name!r}`"
    if zero.get("zero_quantized_gradients"):
        raise ValueError(f"`zero_quantized_gradients` and {word} both compress gradients: set one of them.")
    if config.get("communication_data_type") not in (None, "auto"):
        raise ValueError(f"`communication_data_type` and {word} both say what travels: set one of them.")
    if stage in (1, 2) and zero.get("use_multi_rank_bucket_allreduce", True) is False:
        raise ValueError(
            f"{word} needs `use_multi_rank_bucket_allreduce=True`: without it DeepSpeed reduces to one rank after the "
            "other, past our codec."
        )
    if stage in (1, 2) and zero.get("contiguous_gradients", True) is False:
        raise ValueError(f"{word} needs `contiguous_gradients=True`: without it the order of gradients is not known.")
    if zero.get("stage3_use_all_reduce_for_fetch_params"):
        raise ValueError(
            f"{word} cannot be told from parameters under `stage3_use_all_reduce_for_fetch_params`: leave it out."
        )
    if config.get("sequence_parallel_size", 1) != 1 or "expert_parallel" in config:
        raise ValueError(f"{word} knows data parallel ranks only: choose `compression='none'` with other parallelism.")


def check_device(config: Mapping[str, Any], device: str, zero_plus_plus: bool) -> None:
    """Refuse what a device cannot do.

    Args:
        config: The merged configuration.
        device: Its type.
        zero_plus_plus: Whether DeepSpeed's own quantisation was asked for.

    Raises:
        ValueError: Saying what to do instead.

    """
    zero = config["zero_optimization"]
    if device not in ("cpu", "cuda"):
        raise ValueError(f"Strategy `commopt_deepspeed` runs on CPU and CUDA devices, not on {device}.")
    quantised = zero_plus_plus or any(zero.get(key) for key in _ZERO_PLUS_PLUS)
    if device == "cpu" and quantised:
        raise ValueError(
            "`compression='zero++'` (`zero_quantized_weights`, `zero_quantized_gradients`) uses CUDA kernels of "
            "DeepSpeed and cannot run on the CPU: choose `compression='int8'` or `'int4'`."
        )
    optimizer = config.get("optimizer", {})
    if device == "cpu" and optimizer and not optimizer.get("params", {}).get("torch_adam"):
        raise ValueError(
            f"`optimizer.type={optimizer.get('type')!r}` in the DeepSpeed config compiles C++ for minutes at start on "
            "the CPU: return an optimizer of torch from `configure_optimizers`, or set `torch_adam` in its `params`."
        )


def check_precision(precision: str, device: str, method: Compression) -> None:
    """Refuse fp16 where DeepSpeed has none, and where it would skip steps under a method of ours.

    Raises:
        ValueError: Saying what to do instead.

    """
    if precision not in ("16-mixed", "16-true"):
        return
    if device == "cpu":
        raise ValueError(f"`precision={precision!r}`: DeepSpeed has no fp16 on the CPU. Choose 'bf16-mixed'.")
    if not isinstance(method, Uncompressed):
        raise ValueError(
            f"`precision={precision!r}` with method `{method.name}`: DeepSpeed skips steps after their gradients were "
            "exchanged. Choose 'bf16-mixed', or `compression='none'`."
        )


def check_options(method: Compression, start_step: int | None, residuals: bool | None) -> None:
    """Refuse options that are out of bounds or mean nothing to the method.

    Raises:
        ValueError: Saying what to do instead.

    """
    if start_step is not None and (type(start_step) is not int or start_step < 0):
        raise ValueError(f"`start_step={start_step!r}` must be an int >= 0, or None for the method's default.")
    if start_step and isinstance(method, Uncompressed):
        raise ValueError(f"`start_step={start_step}` has no meaning for method `{method.name}`: leave it out.")
    if residuals not in (None, True, False):
        raise ValueError(f"`residuals={residuals!r}` must be True, False, or None for the method's default.")
    if residuals and not method.error_feedback:
        raise ValueError(f"`residuals=True`: method `{method.name}` drops nothing that could be kept. Leave it out.")


def check_module(module: Module, method: Compression) -> None:
    """Refuse gradients that a method cannot carry.

    Raises:
        ValueError: Naming the module, and what to do instead.

    """
    for name, child in module.named_modules():
        if isinstance(child, Embedding | EmbeddingBag) and child.sparse:
            raise ValueError(
                f"`{name}` yields sparse gradients, which method `{method.name}` does not carry: set `sparse=False` "
                "there, or choose `compression='none'`."
            )
