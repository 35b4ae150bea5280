"""What each method costs in loss, against plain DDP, on the quickstart's model and text.

    python -m benchmarks.convergence                         # every method, three seeds; appends to the results file
    python -m benchmarks.convergence --methods ddp int4      # some of them
    python -m benchmarks.convergence --report                # table and curves from the results so far

A run differs from its partner, plain DDP with the same seed, in the strategy alone: same weights, same batches, same
schedule. Runs that the results file already has are not repeated.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader, Subset

from lightning_commopt import BF16, FP16, CommOptStrategy, Compression, Int4, Int8, OneBit, PowerSGD, TopK
from lightning_commopt.demo.byte_gpt import ByteWindows, LitByteGPT, split_documents

LENGTH, BATCH, VAL_WINDOWS = 128, 2, 256
RESULTS = Path(__file__).parent / "results" / "convergence.jsonl"

METHODS: dict[str, tuple[Compression, int] | None] = {
    "ddp": None,
    "fp16": (FP16(), 0),
    "bf16": (BF16(), 0),
    "int8": (Int8(), 0),
    "int4": (Int4(), 0),
    "onebit": (OneBit(), 60),
    "onebit block 64": (OneBit(block=64), 60),
    "onebit without columns": (OneBit(columns=False), 60),
    "onebit without columns, at once": (OneBit(columns=False), 0),
    "topk 0.01, at once": (TopK(density=0.01), 0),
    "topk 0.1, at once": (TopK(density=0.1), 0),
    "topk 0.2, at once": (TopK(density=0.2), 0),
    "topk 0.1": (TopK(density=0.1), 60),
    "topk 0.2": (TopK(density=0.2), 60),
    "powersgd 4, at once": (PowerSGD(rank=4), 0),
    "powersgd 16, at once": (PowerSGD(rank=16), 0),
    "powersgd 32, at once": (PowerSGD(rank=32), 0),
    "powersgd 16": (PowerSGD(rank=16), 60),
    "powersgd 32": (PowerSGD(rank=32), 60),
    "powersgd 64": (PowerSGD(rank=64), 60),
}
"""What is compared: the method and its dense steps in the beginning; None for plain DDP."""

BARS = {"fp16": 0.5, "bf16": 0.5, "int8": 0.5, "int4": 1.0, "onebit": 2.0, "topk": 2.0, "powersgd": 2.0}
"""Largest mean difference of the final validation loss, in per cent."""


@dataclass
class Run:
    """One training.

    Args:
        method: Key of ``METHODS``.
        seed: Of weights and batches.
        steps: Optimizer steps.
        ranks: Processes.
        start_step: Dense steps in the beginning.
        val_losses: Validation loss by step, nats a byte.
        train_losses: Training loss of rank 0 by step, mean of 20 steps.
        mb_per_step: Megabytes that a rank sends a step, mean over all steps.
        codec_ns_per_element: Encoding and decoding, a step, by the model's parameters.

    """

    method: str
    seed: int
    steps: int
    ranks: int
    start_step: int = 0
    val_losses: dict[int, float] = field(default_factory=dict)
    train_losses: dict[int, float] = field(default_factory=dict)
    mb_per_step: float = 0.0
    codec_ns_per_element: float = 0.0


class Losses(L.Callback):
    """Collects losses while a model trains."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._recent: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Keep the mean training loss of every 20 steps."""
        self._recent.append(float(trainer.callback_metrics["train_loss"]))
        if len(self._recent) == 20:
            self.run.train_losses[trainer.global_step] = mean(self._recent)
            self._recent.clear()

    def on_validation_end(self, trainer: L.Trainer, *_: object) -> None:
        """Keep the validation loss."""
        self.run.val_losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


def train(run: Run) -> None:
    """Train once and write the outcome into ``run``."""
    L.seed_everything(run.seed, verbose=False)
    documents, held_out = split_documents()
    val = ByteWindows(held_out, LENGTH)
    sample = Subset(val, range(0, len(val), len(val) // VAL_WINDOWS)[:VAL_WINDOWS])
    chosen = METHODS[run.method]
    strategy: Strategy = DDPStrategy() if chosen is None else CommOptStrategy(chosen[0], start_step=chosen[1])
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=run.ranks,
        max_steps=run.steps,
        val_check_interval=run.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[Losses(run)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LitByteGPT()
    windows = ByteWindows(documents, LENGTH)
    trainer.fit(model, DataLoader(windows, BATCH, shuffle=True, drop_last=True), DataLoader(sample, 16))
    numel = sum(p.numel() for p in model.parameters())
    if isinstance(strategy, CommOptStrategy):
        stats = strategy.comm_stats()
        run.start_step = strategy.start_step
        run.mb_per_step = stats.sent_bytes / stats.rounds / 1e6
        run.codec_ns_per_element = (stats.encode_ms + stats.decode_ms) * 1e6 / stats.rounds / numel
    else:
        run.mb_per_step = 2 * (run.ranks - 1) / run.ranks * 4 * numel / 1e6


def read(path: Path) -> list[Run]:
    """Return the runs in a results file."""
    if not path.exists():
        return []
    runs = [Run(**json.loads(line)) for line in path.read_text().splitlines()]
    for run in runs:
        run.val_losses = {int(step): loss for step, loss in run.val_losses.items()}
        run.train_losses = {int(step): loss for step, loss in run.train_losses.items()}
    return runs


def rows(runs: list[Run]) -> Iterator[str]:
    """Yield the table in Markdown, one line a method."""
    yield "| method | dense steps | val loss | against DDP, % (± s.e.) | bar, % | MB a step | codec, ns/element |"
    yield "|---|---|---|---|---|---|---|"
    dense = {run.seed: run.val_losses[run.steps] for run in runs if run.method == "ddp"}
    for method in METHODS:
        mine = [run for run in runs if run.method == method and run.seed in dense]
        if not mine:
            continue
        finals = [run.val_losses[run.steps] for run in mine]
        percent = [100 * (loss / dense[run.seed] - 1) for loss, run in zip(finals, mine, strict=True)]
        spread = f" ± {stdev(percent) / len(percent) ** 0.5:.2f}" if len(percent) > 1 else ""
        bar = BARS.get(method.split()[0].strip(","), "")
        seeds = f"{len(mine)} seed{'s' * (len(mine) > 1)}"
        yield (
            f"| {method} | {mine[0].start_step} | {mean(finals):.4f} | {mean(percent):+.2f}{spread} "
            f"({seeds}) | {bar} | {mean(r.mb_per_step for r in mine):.2f} "
            f"| {mean(r.codec_ns_per_element for r in mine):.1f} |"
        )


def plot(runs: list[Run], path: Path) -> None:
    """Draw the training losses, mean over seeds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for method in METHODS:
        mine = [run for run in runs if run.method == method]
        if mine:
            steps = sorted(mine[0].train_losses)
            style = {"color": "black", "linewidth": 2.5} if method == "ddp" else {"linewidth": 1.2}
            axes.plot(steps, [mean(run.train_losses[s] for run in mine) for s in steps], label=method, **style)
    axes.set(xlabel="optimizer step", ylabel="training loss, nats a byte", yscale="log")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is asked for, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print the table and draw the curves, run nothing")
    args = parser.parse_args()
    if args.report:
        print("\n".join(rows(read(args.results))))
        plot(read(args.results), args.results.with_suffix(".png"))
        return
    args.results.parent.mkdir(exist_ok=True)
    warnings.filterwarnings("ignore")  # of Lightning, on data loader workers and trees
    done = {(run.method, run.seed, run.steps, run.ranks) for run in read(args.results)}
    for seed in args.seeds:
        for method in args.methods:
            run = Run(method, seed, args.steps, args.devices)
            if (method, seed, args.steps, args.devices) in done:
                continue
            train(run)
            if L.pytorch.utilities.rank_zero_only.rank == 0:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
                print(f"{method} seed {seed}: {run.val_losses}", flush=True)


if __name__ == "__main__":
    main()
