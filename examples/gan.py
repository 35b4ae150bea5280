"""A generative adversarial network: two optimizers, stepped by hand, with compressed gradients for both.

    python examples/gan.py                   # two processes, int8 on the wire
    python examples/gan.py --strategy ddp_find_unused_parameters_true

The data are points around eight centres on a circle, so that one can count what the generator learned: how many of the
centres it reaches, and how many of its points lie near one. Each ``manual_backward`` is an exchange of its own. The
discriminator's backward reaches no parameter of the generator and the other way round, hence
``find_unused_parameters``, as under DDP.
"""

import argparse
import math
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_commopt.callbacks import CommMonitor  # importing the package also registers the strategy names

CENTRES = 8
SPREAD = 0.05  # standard deviation of the points around a centre
NOISE = 16  # features of the generator's input

# Lightning's own use of a deprecated PyTorch check; nothing that a script could change.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# A batch is a few rows of a tensor in memory: worker processes would only take cores from the training.
warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")


def centres() -> Tensor:
    """Return the centres [8, 2] on the unit circle."""
    angles = torch.arange(CENTRES) * (2 * math.pi / CENTRES)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


class Ring(Dataset[Tensor]):
    """Points [2] around the centres, each as often.

    Args:
        size: Number of points.

    """

    def __init__(self, size: int = 16_384) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = centres().repeat(size // CENTRES, 1) + SPREAD * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


def perceptron(inputs: int, outputs: int, width: int = 256) -> nn.Sequential:
    """Return a network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )  # fmt: skip


class LitGAN(L.LightningModule):
    """The non-saturating game of Goodfellow et al. (https://arxiv.org/abs/1406.2661) with noise on the points.

    Args:
        lr: Learning rate of both optimizers.

    """

    def __init__(self, lr: float = 5e-4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = perceptron(NOISE, 2)
        self.discriminator = perceptron(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Map noise [batch, 16] to points [batch, 2]."""
        points: Tensor = self.generator(noise)
        return points

    def judged(self, points: Tensor) -> Tensor:
        """Return the discriminator's logits of points, blurred a little so that it cannot win outright."""
        logits: Tensor = self.discriminator(points + 0.1 * torch.randn_like(points))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Step the discriminator, then the generator."""
        for optimizer, loss in zip(self.optimizers(), (self.discriminator_loss, self.generator_loss), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def discriminator_loss(self, real: Tensor) -> Tensor:
        """Return the loss of telling real points from made ones."""
        made = self(torch.randn(len(real), NOISE, device=self.device)).detach()
        real_logits, made_logits = self.judged(real), self.judged(made)
        return F.softplus(-real_logits).mean() + F.softplus(made_logits).mean()

    def generator_loss(self, real: Tensor) -> Tensor:
        """Return the loss of making points that pass for real."""
        return F.softplus(-self.judged(self(torch.randn(len(real), NOISE, device=self.device)))).mean()

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Build one Adam for each network."""
        betas = (0.5, 0.9)
        discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=self.lr, betas=betas)
        return discriminator, torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=betas)


@torch.no_grad()
def reached(model: LitGAN, samples: int = 4096) -> tuple[int, float]:
    """Return how many centres the generator reaches, and which part of its points lies near one."""
    noise = torch.randn(samples, NOISE, generator=torch.Generator().manual_seed(0))
    nearest = torch.cdist(model(noise.to(model.device)).cpu(), centres()).min(dim=1)
    near = nearest.values < 6 * SPREAD
    counts = torch.bincount(nearest.indices[near], minlength=CENTRES)
    return int((counts > samples // CENTRES // 5).sum()), near.float().mean().item()


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a GAN with two optimizers.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--strategy", default="commopt_int8_find_unused_parameters_true", help="name of a strategy")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each network")
    parser.add_argument("--batch-size", type=int, default=128, help="points a process and step")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of both optimizers")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the order of the points")
    return parser.parse_args()


def main() -> None:
    """Train for the given number of steps, then look at what the generator makes."""
    args = parse_args()
    L.seed_everything(args.seed, verbose=False)
    model = LitGAN(lr=args.lr)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=2 * args.steps,  # Lightning counts the steps of both optimizers
        max_epochs=-1,
        callbacks=[CommMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(Ring(), batch_size=args.batch_size, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        count, near = reached(model)
        print(f"The generator reaches {count} of {CENTRES} centres; {near:.0%} of its points lie near one.")


# The launcher runs this script once more for every further process.
if __name__ == "__main__":
    main()
