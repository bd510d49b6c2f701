"""Losses that are no mean over samples: a sum (an autoencoder), and one between samples (pairs that belong together).

    evener run examples/09_sum_and_pairs.py --local-nodes 1.0,0.5

Without `count="sum"` and without `evener.gather` the run would be refused before its first step, with the sentence that
says which of them to use; leave one out and see.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.data.digits import load_digits


def autoencoder(run: evener.Run, images: torch.Tensor) -> float:
    """The last loss of an autoencoder whose loss is a sum over samples and pixels."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader, count="sum")
    shown = 0.0
    for _ in run.epochs(2):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(x), x, reduction="sum")
            torch.autograd.backward(loss)
            optimizer.step()
            shown = float(run.mean(loss))
    return shown


def pairs(run: evener.Run, images: torch.Tensor) -> float:
    """The last loss of two encoders, of the upper and the lower halves of images, that are to find each other."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    shown = 0.0
    for _ in run.epochs(2):
        for (x,) in loader:
            optimizer.zero_grad()
            upper, lower = (
                evener.gather(F.normalize(one(half), dim=1)) for one, half in zip(model, x.chunk(2, 1), strict=True)
            )
            loss = F.cross_entropy(upper @ lower.t() / 0.1, torch.arange(len(upper)))
            torch.autograd.backward(loss)
            optimizer.step()
            shown = float(run.mean(loss))
    return shown


def main() -> None:
    """Both, one after the other."""
    run = evener.join()
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits()[0]).float().flatten(1) / 16
    print(f"autoencoder {autoencoder(run, images):.4f}  pairs {pairs(run, images):.4f}")


if __name__ == "__main__":
    main()
