"""A DCGAN in the manner of PyTorch's example: two models, two optimisers, three backward passes a step.

    evener run examples/12_dcgan.py --local-nodes 1.0,0.5

Noise is drawn with the images, so that it does not matter which node computes an image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # 1
from evener.data.digits import load_digits

NOISE = 8


def make_generator() -> nn.Module:
    """Noise (N, 8, 1, 1) -> images (N, 1, 8, 8)."""
    return nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()),
    )


def make_discriminator() -> nn.Module:
    """Images (N, 1, 8, 8) -> logits (N, 1): how real they look."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(128, 1)),
    )


def main() -> None:
    """Train both."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits()[0]).float().unsqueeze(1)[:640] / 8 - 1
    loader = DataLoader(TensorDataset(images, torch.randn(len(images), NOISE, 1, 1)), batch_size=64, shuffle=True)
    generator, discriminator = make_generator(), make_discriminator()
    makers = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judges = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    generator, discriminator, makers, judges, loader = run.prepare(  # 3
        generator, discriminator, makers, judges, loader
    )
    for epoch in run.epochs(2):  # 4
        for real, noise in loader:
            fake = generator(noise)
            judges.zero_grad()
            judged = loss_of(discriminator(real), 1.0) + loss_of(discriminator(fake.detach()), 0.0)
            torch.autograd.backward(judged)
            judges.step()
            makers.zero_grad()
            made = loss_of(discriminator(fake), 1.0)
            torch.autograd.backward(made)
            makers.step()
            shown = run.mean(judged), run.mean(made)  # 5
        print(f"epoch {epoch + 1}  discriminator {shown[0]:.4f}  generator {shown[1]:.4f}")
    if run.leader:
        torch.save(run.state(generator), "generator.pt")


def loss_of(logits: Tensor, label: float) -> Tensor:
    """That all of them are real (1) or made (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


if __name__ == "__main__":
    main()
