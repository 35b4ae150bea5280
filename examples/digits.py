"""Recognise handwritten digits: a small convolutional network, with the accuracy measured by torchmetrics.

    python examples/digits.py                                    # two processes, int8 on the wire
    python examples/digits.py --strategy ddp                     # the same run under Lightning's own DDP
    torchrun --nproc-per-node 2 examples/digits.py --devices 2   # started by torchrun

scikit-learn brings the 1,797 images of 8 x 8 pixels: nothing is downloaded. ``LinearLRScaling`` multiplies the learning
rate, which was found for 32 images a step, by the number of processes, and warms up.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_commopt.callbacks import CommMonitor, LinearLRScaling  # also registers the strategy names

Loader = DataLoader[tuple[Tensor, ...]]

CLASSES = 10
VAL_IMAGES = 360

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# A batch is a few rows of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


class LitDigits(L.LightningModule):
    """A convolutional network for images [batch, 1, 8, 8].

    Logs ``train_loss`` and ``val_accuracy``; torchmetrics adds up the images of all processes.

    Args:
        lr: Learning rate for the batch size at which it was found.

    """

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, CLASSES),
        )  # fmt: skip
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return and log the cross entropy of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count the images that are recognised."""
        images, labels = batch
        self.val_accuracy(self.model(images), labels)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the images to learn from and those to validate with, pixels in [0, 1]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("The digits are scikit-learn's: run `pip install scikit-learn`.")
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, val = order[VAL_IMAGES:], order[:VAL_IMAGES]
    return TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val])


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or other words."""
    parser = argparse.ArgumentParser(
        description="Recognise handwritten digits.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--strategy", default="commopt_int8", help="ddp, commopt, or a preset such as commopt_int8")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2, help="number of processes a node")
    parser.add_argument("--num-nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the images")
    parser.add_argument("--batch-size", type=int, default=32, help="images a process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for 32 images a step")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the order of the images")
    return parser.parse_args(words)


def make_trainer(words: Sequence[str] = ()) -> tuple[L.Trainer, LitDigits, Loader]:
    """Return what trains, the model and its data, ready for ``fit``.

    ``commopt tune examples/digits.py:make_trainer`` and ``commopt doctor --compare`` call it, too.
    """
    args = parse_args(words)
    L.seed_everything(args.seed, verbose=False)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[CommMonitor(), LinearLRScaling(base_batch_size=32, warmup_steps=20)],
        logger=False,
        enable_checkpointing=False,
    )
    train, _ = digits()
    return trainer, LitDigits(lr=args.lr), DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    """Train for the given number of epochs, validating after each."""
    trainer, model, train = make_trainer(sys.argv[1:])
    _, val = digits()
    trainer.fit(model, train_dataloaders=train, val_dataloaders=DataLoader(val, batch_size=60))
    accuracy = trainer.callback_metrics["val_accuracy"].item()
    if trainer.is_global_zero:
        print(f"{accuracy:.1%} of the {VAL_IMAGES} held-out digits are recognised.")


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
