"""What a plan takes for granted, because neither options nor a run say it."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.cli.units import show_bytes, show_rate
from lightning_commopt.planning import Cluster, Model, Training

__all__ = ["Assumption", "assumptions", "shown_assumptions"]

_Words = Callable[[Model, Training, Cluster], str]

_WORDS: dict[str, _Words] = {
    "accelerator": lambda m, t, c: "GPUs",
    "gpus-per-node": lambda m, t, c: f"all {c.devices} devices on one node",
    "gpu-memory": lambda m, t, c: f"{show_bytes(c.memory)} of memory a device",
    "gpu-memory-bandwidth": lambda m, t, c: f"{show_bytes(c.memory_rate)}/s of memory bandwidth",
    "tflops": lambda m, t, c: f"{c.flops_per_second / 1e12:g} TFLOPS a device",
    "mfu": lambda m, t, c: f"{c.utilisation:.0%} of a device's peak reached",
    "intra": lambda m, t, c: f"{show_rate(c.intra_rate)} inside a node",
    "intra-latency-us": lambda m, t, c: f"{c.intra_latency_ms * 1e3:g} us for a message inside a node",
    "inter-latency-us": lambda m, t, c: f"{c.inter_latency_ms * 1e3:g} us for a message between nodes",
    "layers": lambda m, t, c: f"{m.layers} blocks, as a GPT has",
    "hidden": lambda m, t, c: f"width {m.hidden}, a GPT's",
    "heads": lambda m, t, c: f"{m.heads} heads of attention",
    "seq": lambda m, t, c: f"{m.sequence} tokens a sample",
    "vocab": lambda m, t, c: f"an output layer of {m.vocabulary}",
    "batch-per-gpu": lambda m, t, c: f"{t.global_batch // c.devices} samples of a step for each device",
    "precision": lambda m, t, c: f"precision {t.precision}",
    "optimizer": lambda m, t, c: t.optimizer,
    "attention": lambda m, t, c: f"{t.attention} attention",
}
_OF_A_GPU = ("gpu-memory", "gpu-memory-bandwidth", "tflops", "mfu", "intra")


@dataclass(frozen=True)
class Assumption:
    """One thing that nobody said.

    Args:
        option: Which says it.
        words: What is taken.

    """

    option: str
    words: str


def assumptions(model: Model, training: Training, cluster: Cluster, said: Mapping[str, object]) -> list[Assumption]:
    """Return what is taken where nothing was said, as far as it has an effect.

    Args:
        model: Of the plan.
        training: Of the plan.
        cluster: Of the plan.
        said: By option, what a person or a run says; None: nothing.

    """
    without_effect = {
        *(["gpus-per-node"] if cluster.devices == 1 else []),
        *(["intra", "intra-latency-us"] if cluster.local == 1 else []),
        *(["inter-latency-us"] if cluster.nodes == 1 else []),
        *(["tflops", "mfu"] if training.compute_ms is not None else []),
    }
    names = [name for name, value in said.items() if value is None and name not in without_effect]
    return [Assumption(f"--{name}", _WORDS[name](model, training, cluster)) for name in names]


def shown_assumptions(found: Sequence[Assumption], cluster: Cluster) -> list[str]:
    """Return the same for people, with a warning where numbers of a GPU stand for a CPU's."""
    if not found:
        return []
    words = "; ".join(f"{one.words} (`{one.option}`)" for one in found)
    shown = [_wrapped(f"Assumed, since nothing says otherwise: {words}.")]
    of_a_gpu = [f"`{one.option}`" for one in found if one.option[2:] in _OF_A_GPU]
    if cluster.kind == "cpu" and of_a_gpu:
        shown.append(
            _wrapped(f"Warning: these devices are CPU processes, and the numbers of {', '.join(of_a_gpu)} are a GPU's.")
        )
    return shown


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
