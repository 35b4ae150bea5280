"""Train a byte-level GPT that is cut into two stages, one a process.

    python examples/pipeline_gpt.py                          # two processes, 1F1B
    python examples/pipeline_gpt.py --schedule zbv           # another schedule
    python examples/pipeline_gpt.py --devices 4 --stages 2   # two replicas of two stages

The model and its data (``lightning_commopt/demo/byte_gpt.py``) are plain Lightning code, the same as in
``quickstart.py``; the strategy alone is another. It prints how it cut the model. Each process holds its own stage, and
the checkpoint is that of one process.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Subset

from lightning_commopt import CommOptPipelineStrategy
from lightning_commopt.demo.byte_gpt import ByteWindows, LitByteGPT, split_documents

LENGTH = 128  # bytes that the model sees at once
VAL_WINDOWS = 64

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# A batch is a few slices of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT in pipeline stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zbv")
    parser.add_argument("--stages", type=int, default=2, help="processes that share one copy of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="parts into which a batch is cut")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help=f"windows of {LENGTH} bytes a step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the order of the windows")
    return parser.parse_args()


@rank_zero_only
def show_checkpoint(path: Path) -> None:
    """Load the checkpoint without any strategy."""
    model = LitByteGPT.load_from_checkpoint(path, map_location="cpu")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.load(path, map_location="cpu", weights_only=True)["optimizer_states"][0]
    print(f"The checkpoint holds all {parameters:,} parameters and the state of {len(optimizer['state'])} tensors.")


def main() -> None:
    """Train for the given number of steps, validate once, and look at the checkpoint."""
    args = parse_args()
    L.seed_everything(args.seed, verbose=False)
    train, val = (ByteWindows(documents, LENGTH) for documents in split_documents())
    val_sample = Subset(val, range(0, len(val), len(val) // VAL_WINDOWS)[:VAL_WINDOWS])  # a fixed, even sample

    trainer = L.Trainer(
        strategy=CommOptPipelineStrategy(args.stages, args.microbatches, args.schedule),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        LitByteGPT(lr=args.lr),
        train_dataloaders=DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True),
        val_dataloaders=DataLoader(val_sample, batch_size=16),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.ckpt"
        trainer.save_checkpoint(path)
        show_checkpoint(path)


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
