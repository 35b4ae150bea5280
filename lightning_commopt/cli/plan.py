"""``commopt plan``."""

import re
from typing import Literal

from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer
from lightning_commopt.cli.plan_assumed import assumptions, shown_assumptions
from lightning_commopt.cli.plan_known import Known, known_of
from lightning_commopt.cli.plan_output import plan_data, shown_plan
from lightning_commopt.cli.units import byte_rate, byte_size, count, listed, show_count
from lightning_commopt.compression import METHODS
from lightning_commopt.planning import Cluster, Model, Training, remedies
from lightning_commopt.planning import plan as rank

__all__ = ["plan"]

_INTRA, _MEMORY, _MEMORY_RATE, _BATCH_PER_GPU = 3e11, 80e9, 1.5e12, 8
_TFLOPS, _MFU, _INTER_LATENCY_US, _INTRA_LATENCY_US = 312.0, 0.4, 20.0, 5.0
_SEQUENCE, _VOCABULARY = 2048, 50257
_OF_CLASS_C = [word for word, method in METHODS.items() if method.loss_safety == "C"]
_FLAGS = {
    "devices": "gpus",
    "per_node": "gpus-per-node",
    "memory": "gpu-memory",
    "flops_per_second": "tflops",
    "utilisation": "mfu",
    "memory_rate": "gpu-memory-bandwidth",
    "inter_rate": "inter",
    "intra_rate": "intra",
    "inter_latency_ms": "inter-latency-us",
    "intra_latency_ms": "intra-latency-us",
    "sequence": "seq",
    "vocabulary": "vocab",
}
"""What is called otherwise on the command line."""


def plan(
    params: str | None = None,
    gpus: int | None = None,
    from_: str | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: str | None = None,
    tflops: float | None = None,
    mfu: float | None = None,
    gpu_memory_bandwidth: str | None = None,
    inter: str | None = None,
    intra: str | None = None,
    inter_latency_us: float | None = None,
    intra_latency_us: float | None = None,
    straggler: float = 1.0,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    seq: int | None = None,
    vocab: int | None = None,
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    precision: Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true"] | None = None,
    optimizer: Literal["adamw", "sgd"] | None = None,
    checkpointing: bool = False,
    attention: Literal["flash", "stored"] | None = None,
    compute_ms: float | None = None,
    activation_memory: str | None = None,
    accelerator: Literal["gpu", "cpu"] | None = None,
    allow: str = "",
    top: int = 2,
) -> Answer:
    """How should this model be trained on this cluster?

    Data parallel, pipeline, tensor parallel or shards, and with which compression?

    Predicts memory, bytes and time of a step for every layout and method, ranks them, and prints the Trainer's code of
    the best. Example:

      commopt plan --params 1.3e9 --gpus 16 --gpus-per-node 8 --gpu-memory 40GB --inter 25Gbit --intra 300GB/s

    After a run with CommMonitor(report="run.json"), measured instead of assumed:

      commopt plan --from run.json --gpus 8 --inter 1Gbit

    What neither options nor a run say is assumed, and listed in the end.

    While a copy takes at most 80 % of one device, data parallel comes first. Exit code 1: nothing fits; it says what
    would help.

    Args:
        params: Trainable parameters, such as 1.3e9, 350M or 7B.
        gpus: Devices, all nodes together.
        from_: A run.json of CommMonitor: its parameters, batch, compute, link and codecs, measured, where other options
            do not say otherwise.
        gpus_per_node: Devices of a node. All of them where it is left out.
        gpu_memory: Memory of one device, such as 40GB or 80GiB; 80GB by default.
        tflops: Peak of one device in the precision in use, 10^12 operations a second; 312 by default.
        mfu: Part of that peak that a training step reaches, 0 to 1; 0.4 by default.
        gpu_memory_bandwidth: Of one device, 1.5TB/s by default; codecs and optimizers are taken to be as fast.
        inter: What a node sends to other nodes in one direction, all its cards together, such as 25Gbit.
        intra: What a device sends to others of its node in one direction, such as 300GB/s (vendors often
            add up both); 300GB/s by default.
        inter_latency_us: Of an empty message between nodes, microseconds; 20 by default.
        intra_latency_us: Of an empty message inside a node, microseconds; 5 by default.
        straggler: How many times as long the slowest device computes, such as 1.2.
        layers: Blocks of a transformer. Left out: shaped like GPT-3's models.
        hidden: Width of a transformer.
        heads: Of attention.
        seq: Tokens of a sample; 2048 by default.
        vocab: Size of the output layer, 0 for none; 50257 by default.
        batch_per_gpu: Samples of a step for each device; 8 by default.
        global_batch: Samples of a step on all devices together, instead.
        precision: As the Trainer has it; bf16-mixed by default.
        optimizer: Of the two moments or the one that are kept; adamw by default.
        checkpointing: Activations of a block are computed again in backward.
        attention: Whether backward finds the scores of attention stored, or a fused kernel (flash, the default)
            computes them again.
        compute_ms: Measured forward and backward of one device's samples of a step, milliseconds, instead of tflops.
        activation_memory: Measured activations of one sample, such as 300MB, instead of a transformer's.
        accelerator: gpu by default. Where it is cpu, a device stands for a process.
        allow: Methods of class C that may be recommended: onebit, topk, powersgd, or several, such as onebit,topk.
        top: So many rows' code is printed.

    """
    known = Known() if from_ is None else known_of(from_)
    numel = known.params if params is None else count(params)
    gpus = known.gpus if gpus is None else gpus
    if numel is None or gpus is None:
        raise UsageError("`--params` and `--gpus` are missing, such as `--params 1.3e9 --gpus 16`; or give `--from`.")
    if batch_per_gpu is not None and global_batch is not None:
        raise UsageError("`--batch-per-gpu` and `--global-batch` both say how many samples a step has: give one.")
    per_node = (known.per_node or max(gpus, 1)) if gpus_per_node is None else gpus_per_node
    nothing_between = inter is None and known.inter_rate is None
    if gpus > per_node > 0 and nothing_between:
        raise UsageError("`--inter` is missing: what a node sends to the others in one direction, such as 25Gbit.")
    inside = known.intra_rate or _INTRA if intra is None else byte_rate(intra)
    each = (known.batch_per_gpu or _BATCH_PER_GPU) if batch_per_gpu is None else batch_per_gpu
    if each < 1:
        raise UsageError(f"`--batch-per-gpu={each}` must be at least 1.")
    batch = each * gpus if global_batch is None else global_batch
    compute, scaled = _compute(compute_ms, batch / max(1, gpus), numel, known)
    allowed = listed("allow", allow.strip("[]"))
    if unknown := [word for word in allowed if word not in _OF_CLASS_C]:
        raise UsageError(f"`--allow {unknown[0]}` is no method of class C: choose from {', '.join(_OF_CLASS_C)}.")
    if top < 0:
        raise UsageError(f"`--top={top}` must be at least 0.")
    try:
        cluster = Cluster(
            gpus,
            per_node,
            _MEMORY if gpu_memory is None else byte_size(gpu_memory),
            (_TFLOPS if tflops is None else tflops) * 1e12,
            _MFU if mfu is None else mfu,
            _MEMORY_RATE if gpu_memory_bandwidth is None else byte_rate(gpu_memory_bandwidth),
            byte_rate(inter) if inter is not None else known.inter_rate or inside,
            inside,
            _first(inter_latency_us, known.inter_latency_us, _INTER_LATENCY_US) * 1e-3,
            _first(intra_latency_us, known.intra_latency_us, _INTRA_LATENCY_US) * 1e-3,
            straggler,
            "cpu" if (accelerator or known.accelerator) == "cpu" else "cuda",
            known.stolen_ns_per_byte,
            known.contention,
            known.codecs,
        )
        model = Model.shaped(
            numel,
            layers=layers,
            hidden=hidden,
            heads=heads,
            sequence=_SEQUENCE if seq is None else seq,
            vocabulary=_VOCABULARY if vocab is None else vocab,
        )
        training = Training(
            batch,
            precision or known.precision or "bf16-mixed",
            optimizer or "adamw",
            checkpointing,
            attention or "flash",
            *compute,
            None if activation_memory is None else byte_size(activation_memory),
        )
    except UsageError:
        raise
    except ValueError as error:
        raise _usage(error) from None
    ranking = rank(model, training, cluster, allowed)
    help_with = [] if ranking.feasible else list(remedies(model, training, cluster, ranking))
    told = known.compared(ranking)
    said = {
        "accelerator": accelerator or known.accelerator,
        "gpus-per-node": known.per_node if gpus_per_node is None else gpus_per_node,
        "gpu-memory": gpu_memory,
        "gpu-memory-bandwidth": gpu_memory_bandwidth,
        "tflops": tflops,
        "mfu": mfu,
        "intra": known.intra_rate if intra is None else intra,
        "intra-latency-us": known.intra_latency_us if intra_latency_us is None else intra_latency_us,
        "inter-latency-us": known.inter_latency_us if inter_latency_us is None else inter_latency_us,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq": seq,
        "vocab": vocab,
        "batch-per-gpu": known.batch_per_gpu if batch_per_gpu is None and global_batch is None else batch,
        "precision": precision or known.precision,
        "optimizer": optimizer,
        "attention": attention,
    }
    assumed = assumptions(model, training, cluster, said)
    return Answer(
        {**plan_data(model, training, cluster, ranking, help_with, top), "run": told, "assumed": assumed},
        [
            *shown_plan(model, training, cluster, ranking, help_with, top),
            *(f"\n{text}" for text in shown_assumptions(assumed, cluster)),
            *([] if told is None else [told.sentence]),
            *scaled,
        ],
        0 if ranking.feasible else 1,
    )


def _first(*values: float | None) -> float:
    """Return the first that is there."""
    return next(value for value in values if value is not None)


def _compute(
    given_ms: float | None, samples: float, params: int, known: Known
) -> tuple[tuple[float | None, float], list[str]]:
    """Return what forward and backward of so many samples take, and a sentence where it is not as measured."""
    if given_ms is not None:
        return (given_ms, samples), []
    if known.compute_ms is None and known.gpus is not None:
        sentence = "\nThe run tells no compute (it was too short), so that it follows from `--tflops` and `--mfu`."
        return (None, 1.0), [sentence]
    if known.compute_ms is None or known.params == params:
        return (known.compute_ms, known.compute_samples), []
    assert known.params is not None
    times = params / known.params
    sentence = (
        f"\nThe run's model has {show_count(known.params)} parameters: its compute is taken {times:.3g} times, as "
        "operations grow with parameters; `--compute-ms` sets it."
    )
    return (known.compute_ms * times, known.compute_samples), [sentence]


def _usage(error: ValueError) -> UsageError:
    """Return an error that names options as a person writes them."""
    names = "|".join(_FLAGS)
    text = re.sub(rf"`(\w+(?==)|(?:{names})(?=`))", lambda match: f"`--{_flag(match[1])}", str(error))
    return UsageError(text)


def _flag(name: str) -> str:
    return _FLAGS.get(name, name.replace("_", "-"))
