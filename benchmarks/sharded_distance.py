"""How far parameters end from plain DDP's after 300 steps, under each strategy that shards, stage and method.

    python -m benchmarks.sharded_distance                           # all rows; writes the results file
    python -m benchmarks.sharded_distance --only deepspeed sharded  # some families; the others' rows stay
    python -m benchmarks.sharded_distance --report                  # the table from the results so far

The script starts itself under ``torchrun`` once a family, on as many CPU processes as the family needs. All fits of a
family have the same weights and batches. The distance is the 2-norm of the difference over that of DDP's parameters.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptDeepSpeedStrategy, CommOptShardedStrategy

STEPS, ROWS, WIDTH = 300, 8, 40
RESULTS = Path(__file__).parent / "results" / "sharded_distance.json"


@dataclass(frozen=True)
class Row:
    """What one fit came to.

    Args:
        family: Kind of strategy.
        case: What it was asked for.
        distance: Of its parameters from DDP's, relative.
        loss: Mean over ranks and the last 20 steps.
        ddp_loss: The same under DDP.
        mb_per_step: Megabytes (1e6) of gradients that a rank sends in a step, between nodes where there are some.
        ratio: Bytes that are sent without compression, over those sent.
        inside_mb_per_step: Megabytes (1e6) of gradients and parameters that a rank sends inside its node in a step,
            where they are counted apart.

    """

    family: str
    case: str
    distance: float
    loss: float
    ddp_loss: float
    mb_per_step: float
    ratio: float | None
    inside_mb_per_step: float | None = None


Cases = Iterator[tuple[str, Callable[[], Strategy]]]


METHODS = ("none", "bf16", "fp16", "int8", "int4", "onebit")


def deepspeed_cases() -> Cases:
    """Every method at every stage of ZeRO, with a bucket for each weight matrix."""
    for stage in range(4):
        for method in METHODS:
            options: dict[str, Any] = {"reduce_bucket_size": 4100, **at_once(method)}
            yield f"stage {stage}, {method}", partial(CommOptDeepSpeedStrategy, stage, method, **options)


INSIDE: list[tuple[str, str | None, str | None]] = [
    ("none", "bf16", None),
    ("none", "int8", None),
    ("none", None, "bf16"),
    ("none", None, "int8"),
    ("none", None, "int4"),
    ("none", "int8", "int8"),
    ("bf16", "bf16", "bf16"),
    ("int8", "int8", "int8"),
]
"""Method between nodes, codec of parameters and codec of gradients inside them."""


def sharded_cases() -> Cases:
    """Every method between two nodes of two ranks, and codecs inside them."""
    make = partial(CommOptShardedStrategy, wrap=2000, hierarchy=2)
    for method in (*METHODS, "topk", "powersgd"):
        yield method, partial(make, method, **at_once(method))
    for method, gather, scatter in INSIDE:
        inside = [f"{what} {codec}" for what, codec in (("parameters", gather), ("gradients", scatter)) if codec]
        codecs = {"shard_gather": gather, "shard_scatter": scatter}
        yield f"{method}; inside nodes {', '.join(inside)}", partial(make, method, **codecs, **at_once(method))


def at_once(method: str) -> dict[str, Any]:
    """Return what lets a method begin with the first step."""
    return {} if method == "none" else {"start_step": 0}


FAMILIES: dict[str, tuple[int, Callable[[], Cases]]] = {
    "deepspeed": (2, deepspeed_cases),
    "sharded": (4, sharded_cases),
}
"""Processes that a family needs, and its cases."""


class Regression(pl.LightningModule):
    """Three weight matrices whose sizes no world divides, a norm, and biases; 9,509 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 67), nn.LayerNorm(67), nn.Tanh(), nn.Linear(67, 61), nn.Tanh(), nn.Linear(61, WIDTH)
        )
        self.losses: list[float] = []
        self.whole = Tensor()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.layers(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)

    @override
    def on_train_end(self) -> None:
        parameters = list(self.parameters())
        if any(hasattr(p, "ds_id") for p in parameters):
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameters):
                self.whole = flat(parameters)
        else:
            self.whole = flat([p.full_tensor() if isinstance(p, DTensor) else p for p in parameters])


def flat(parameters: list[Any]) -> Tensor:
    """Return a copy of all parameters in one vector."""
    return torch.cat([p.detach().double().flatten() for p in parameters])


def fit(strategy: "str | Strategy") -> tuple[Regression, Any]:
    """Train once on this rank's batches."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inputs = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    model = Regression()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            max_epochs=1,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **quiet,
        )
        data: Any = [(x, x.flip(-1).sin()) for x in inputs]
        trainer.fit(model, DataLoader(data, batch_size=None))
    return model, trainer.strategy


def work(family: str) -> None:
    """Fit all cases of a family in this rank; rank 0 prints the rows."""
    torch.set_num_threads(1)
    reference, _ = fit("ddp")
    for case, strategy in FAMILIES[family][1]():
        model, ours = fit(strategy())
        stats = ours.comm_stats()
        losses = torch.tensor([sum(m.losses[-20:]) / 20 for m in (model, reference)], dtype=torch.float64)
        dist.all_reduce(losses)
        loss, ddp_loss = (losses / dist.get_world_size()).tolist()
        distance = float((model.whole - reference.whole).norm() / reference.whole.norm())
        inside = stats.promised.inside_node / STEPS / 1e6
        between = stats.sent_bytes / STEPS / 1e6 - inside
        row = Row(family, case, distance, loss, ddp_loss, between, stats.compression_ratio, inside or None)
        if dist.get_rank() == 0:
            print(json.dumps(asdict(row)), flush=True)


def measure(family: str) -> list[Row]:
    """Fit all cases of a family in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={FAMILIES[family][0]}"]
    process = subprocess.run(
        [*command, "-m", "benchmarks.sharded_distance", "--worker", family],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    return [Row(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith('{"family"')]


def table(rows: list[Row]) -> str:
    """Lay rows out in Markdown."""
    lines = [
        "| strategy | case | distance from DDP | loss (DDP's) | MB a step | ratio | MB inside nodes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        inside = "" if row.inside_mb_per_step is None else f"{row.inside_mb_per_step:.4f}"
        losses = f"{row.loss:.4f} ({row.ddp_loss:.4f})"
        what = f"| {row.family} | {row.case} | {row.distance:.2g} | {losses} "
        lines.append(f"{what}| {row.mb_per_step:.4f} | {ratio} | {inside} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what was asked for, and show everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families to measure")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--worker", choices=FAMILIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    for family in () if args.report else args.only:
        rows = [row for row in rows if row.family != family] + measure(family)
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
