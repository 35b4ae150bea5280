"""Train the byte-level GPT of the quickstart from the command line, with the strategy in a YAML file.

    python examples/cli.py fit --config examples/configs/int8.yaml
    python examples/cli.py fit --config examples/configs/int8.yaml --trainer.strategy.compression.block=128
    python examples/cli.py fit --trainer.strategy=commopt_topk --trainer.max_steps=100
    python examples/cli.py fit --config examples/configs/powersgd.yaml --print_config

Every option of ``CommOptStrategy``, those of Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``
included, is a key of the file and a flag. A method without options is its word (``compression: int8``), with options
its class. A strategy without options is its name (``commopt_int8``): LightningCLI takes a class that stands alone for a
name. Lightning writes the whole configuration of a run to ``lightning_logs/version_*/config.yaml``.
"""

import warnings

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_commopt.callbacks import CommMonitor  # importing the package also registers the strategy names
from lightning_commopt.demo.byte_gpt import ByteWindows, LitByteGPT, split_documents

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# A batch is a few slices of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


class ByteText(LightningDataModule):
    """The language reference and the standard library of this Python, as windows of bytes.

    Args:
        length: Bytes that the model sees at once.
        batch_size: Windows a process and step.
        val_windows: Held-out windows, an even sample.

    """

    def __init__(self, length: int = 128, batch_size: int = 4, val_windows: int = 256) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size
        self.val_windows = val_windows

    def setup(self, stage: str) -> None:
        """Read the text."""
        self.train, self.val = (ByteWindows(documents, self.length) for documents in split_documents())

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the windows to learn from."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the sample of held-out windows."""
        every = max(1, len(self.val) // self.val_windows)
        return DataLoader(Subset(self.val, range(0, len(self.val), every)[: self.val_windows]), batch_size=16)


class CLI(LightningCLI):
    """The command line; ``--monitor.*`` are the options of the callback that prints the table at the end."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the monitor."""
        parser.add_lightning_class_args(CommMonitor, "monitor")


def main(args: list[str] | None = None, run: bool = True) -> CLI:
    """Parse the command line and do what it says.

    Args:
        args: None for those of this process.
        run: Whether to run the subcommand; otherwise there is none, and everything is only built.

    """
    return CLI(
        LitByteGPT,
        ByteText,
        args=args,
        run=run,
        seed_everything_default=1,
        trainer_defaults={
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": 300,
            "val_check_interval": 300,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": False,
        },
        auto_configure_optimizers=False,
    )


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
