"""Train a byte-level GPT under DeepSpeed ZeRO with compressed gradients, and load what it leaves without DeepSpeed.

    python examples/deepspeed_gpt.py                              # two processes, stage 2, int8
    python examples/deepspeed_gpt.py --stage 3 --compression int4
    python examples/deepspeed_gpt.py --compression none           # gradients as DeepSpeed sends them

The model and its data (``lightning_commopt/demo/byte_gpt.py``) are plain Lightning code, the same as in
``quickstart.py``. DeepSpeed writes a folder to which each process contributes its part; ``consolidate`` makes one file
of it for a plain Trainer.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Subset

from lightning_commopt import CommOptDeepSpeedStrategy
from lightning_commopt.callbacks import CommMonitor
from lightning_commopt.demo.byte_gpt import ByteWindows, LitByteGPT, split_documents
from lightning_commopt.zero.consolidate import consolidate

LENGTH = 128  # bytes that the model sees at once
VAL_WINDOWS = 64

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# DeepSpeed's own use of collectives that PyTorch has renamed.
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated")
# A batch is a few slices of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT under DeepSpeed ZeRO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stage", type=int, default=2, help="0: replicas; 1, 2, 3: what ZeRO keeps in parts")
    parser.add_argument("--compression", default="int8", help="none, bf16, fp16, int8, int4, onebit or zero++")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=4, help=f"windows of {LENGTH} bytes a process and step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the order of the windows")
    return parser.parse_args()


@rank_zero_only
def show_checkpoint(folder: Path) -> None:
    """Make one file of DeepSpeed's folder, and load it without any strategy."""
    file = folder.with_suffix(".ckpt")
    consolidate(folder, file)
    model = LitByteGPT.load_from_checkpoint(file, map_location="cpu")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"The consolidated checkpoint holds all {parameters:,} parameters.")


def main() -> None:
    """Train for the given number of steps, validate once, and look at the checkpoint."""
    args = parse_args()
    L.seed_everything(args.seed, verbose=False)
    train, val = (ByteWindows(documents, LENGTH) for documents in split_documents())
    val_sample = Subset(val, range(0, len(val), len(val) // VAL_WINDOWS)[:VAL_WINDOWS])  # a fixed, even sample

    trainer = L.Trainer(
        strategy=CommOptDeepSpeedStrategy(args.stage, args.compression),
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(trainer.strategy.broadcast(scratch)) / "model"
        trainer.save_checkpoint(folder)
        show_checkpoint(folder)
        trainer.strategy.barrier()


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
