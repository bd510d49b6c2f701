"""The program that `own_program.py` times: a convolutional network on random images, with Evener's lines."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener


def make_model() -> nn.Module:
    """A network whose step takes some tens of milliseconds on one core."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))


def make_data(samples: int) -> TensorDataset:
    """Random images of 3 x 16 x 16 and classes."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 3, 16, 16, generator=draw), torch.randint(0, 10, (samples,), generator=draw)
    )


def main() -> None:
    """Train as a user would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=224)
    parser.add_argument("--idle-ms", type=float, default=0.0, help="that a sample waits, in the place of computing")
    words = parser.parse_args()
    run = evener.join()
    model = make_model() if not words.idle_ms else nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(make_data(words.batch * 10), batch_size=words.batch, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(-(-words.steps // 10)):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(len(x) * words.idle_ms / 1e3)
            loss = nn.functional.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
