"""A variational autoencoder in the manner of PyTorch's example: its loss is a sum, and `count="sum"` says so.

evener run examples/13_vae.py --local-nodes 1.0,0.5
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # 1
from evener.data.digits import load_digits


class VAE(nn.Module):
    """Images (N, 64) to a normal distribution of 8 numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 32), nn.Linear(8, 32)
        self.mean, self.spread, self.image = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encode(x))
        mean, spread = self.mean(hidden), self.spread(hidden)  # of which the latter is log(variance)
        code = mean + noise * torch.exp(0.5 * spread)
        return self.image(F.relu(self.decode(code))), mean, spread


def loss_of(made: Tensor, x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Summed over samples and pixels (Kingma & Welling, 2013, appendix B)."""
    off = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
    return off - 0.5 * torch.sum(1 + spread - mean.square() - spread.exp())


def main() -> None:
    """Train it on digits."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits()[0]).float().flatten(1) / 16
    loader = DataLoader(TensorDataset(images, torch.randn(len(images), 8)), batch_size=64, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, loader, count="sum")  # 3
    for epoch in run.epochs(3):  # 4
        total = 0.0
        for x, noise in loader:
            optimizer.zero_grad()
            loss = loss_of(*_arguments(model(x, noise), x))
            torch.autograd.backward(loss)
            optimizer.step()
            total += float(run.mean(loss))  # 5
        print(f"epoch {epoch + 1}  loss {total / len(images):.3f} an image")


def _arguments(made: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return made[0], x, made[1], made[2]


if __name__ == "__main__":
    main()
