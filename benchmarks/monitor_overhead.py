"""What ``CommMonitor`` costs: fits with and without it in turn, in the same processes.

    python -m benchmarks.monitor_overhead                 # two ranks on the CPU, int8
    python -m benchmarks.monitor_overhead --report-page   # with the HTML report too

Two figures. *Inside*: the time that the training thread spends in the monitor's hooks, over the time of the steps.
*Ratio*: the median step with it over the median step without it, fits in turn, with the quartiles of the pairs; this
holds everything, and the noise of the machine too.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from lightning_commopt.callbacks import CommMonitor
from lightning_commopt.demo.byte_gpt import ByteWindows, LitByteGPT, split_documents

_WARM_UP = 10
_HOOKS = ("on_train_start", "on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")


class Steps(pl.Callback):
    """Times every batch from the end of the one before."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Duration of each step after the first ones."""
        return [after - before for before, after in zip(self.ends[_WARM_UP:], self.ends[_WARM_UP + 1 :], strict=False)]


class Watched(CommMonitor):
    """Adds up the time inside its own hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(table=False, **options)
        self.inside: list[float] = []
        for name in _HOOKS:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def call(*args: Any) -> None:
            start = time.perf_counter()
            hook(*args)
            self.inside.append(time.perf_counter() - start)

        return call


def fit(strategy: str, steps: int, monitor: Watched | None) -> list[float]:
    """Train a small GPT; return the seconds of its steps."""
    clock = Steps()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=steps,
        callbacks=[clock] if monitor is None else [monitor, clock],
        logger=False,
        barebones=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=50,
    )
    windows = ByteWindows(split_documents()[0], 128)
    trainer.fit(LitByteGPT(), DataLoader(windows, batch_size=4, shuffle=True, drop_last=True))
    return clock.seconds


def rank(index: int, args: argparse.Namespace) -> None:
    """One rank: fits in turn; rank 0 tells."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index)}
    torch.set_num_threads(1)
    pairs, inside, plain, watched = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        options = {"report": Path(folder) / "report.html"} if args.report_page else {}
        for _ in range(args.pairs):
            monitor = Watched(**options)
            without, with_it = fit(args.strategy, args.steps, None), fit(args.strategy, args.steps, monitor)
            pairs.append(median(with_it) / median(without))
            inside.append(sum(monitor.inside) / (median(with_it) * args.steps))
            plain.append(median(without))
            watched.append(median(with_it))
    if index == 0:
        low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else (pairs[0],) * 3
        print(
            f"{args.strategy}, {args.ranks} ranks, {args.pairs} pairs of {args.steps} steps, an interval of 50: "
            f"a step takes {1e3 * median(plain):.1f} ms without and {1e3 * median(watched):.1f} ms with the monitor; "
            f"inside {100 * median(inside):.2f} % of a step; ratio {median(pairs):.4f} [{low:.4f}, {high:.4f}]"
        )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="commopt_int8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--report-page", action="store_true", help="write the HTML report in each fit too")
    args = parser.parse_args()
    os.environ |= {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29687"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(args.ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "overhead"}
    mp.spawn(rank, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
