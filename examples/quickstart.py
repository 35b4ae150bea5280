"""Train a byte-level GPT on two processes with compressed gradients, and see what that saved.

    python examples/quickstart.py                    # int8 on the wire
    python examples/quickstart.py --strategy ddp     # the same run under Lightning's own DDP

The model and its data (``lightning_commopt/demo/byte_gpt.py``) are plain Lightning code. Two things here are not: the
name of the strategy, and the ``CommMonitor`` callback, which measures the run and prints the table at its end.
``commopt demo`` runs the same without this file, and on a slow link.
"""

import argparse

import lightning as L

from lightning_commopt.callbacks import CommMonitor  # importing the package also registers the strategy names
from lightning_commopt.demo.byte_gpt import LENGTH, LitByteGPT, loaders, quiet


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
    quiet()
    args = parse_args()
    L.seed_everything(args.seed, verbose=False)
    train, val = loaders(args.batch_size)
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
    trainer.fit(LitByteGPT(lr=args.lr), train_dataloaders=train, val_dataloaders=val)


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
