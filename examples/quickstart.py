"""Train a byte-level GPT on two processes with compressed gradients, and see what that saved.

    python examples/quickstart.py                    # int8 on the wire
    python examples/quickstart.py --strategy ddp     # the same run under Lightning's own DDP

The model and its data (``byte_gpt.py``) are plain Lightning code. Two things here are not: the name of the strategy,
and the ``CommMonitor`` callback, which measures the run and prints the table at its end.
"""

import argparse
import warnings

import lightning as L
from byte_gpt import ByteWindows, LitByteGPT, split_documents
from torch.utils.data import DataLoader, Subset

from lightning_commopt.callbacks import CommMonitor  # importing the package also registers the strategy names

LENGTH = 128  # bytes that the model sees at once
VAL_WINDOWS = 256

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# A batch is a few slices of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with compressed gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--strategy", default="commopt_int8", help="ddp, commopt, or a preset such as commopt_int8")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=4, help=f"windows of {LENGTH} bytes a process and step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the order of the windows")
    return parser.parse_args()


def main() -> None:
    """Train for the given number of steps, then validate once."""
    args = parse_args()
    L.seed_everything(args.seed, verbose=False)
    train, val = (ByteWindows(documents, LENGTH) for documents in split_documents())
    val_sample = Subset(val, range(0, len(val), len(val) // VAL_WINDOWS)[:VAL_WINDOWS])  # a fixed, even sample

    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[CommMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        LitByteGPT(lr=args.lr),
        train_dataloaders=DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True),
        val_dataloaders=DataLoader(val_sample, batch_size=16),
    )


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
