"""Data that come as a stream without an end: every node reads all of it and keeps its part of each batch.

    evener run examples/15_stream.py --local-nodes 1.0,0.5

A stream has to be the same on all nodes, which is compared: seed what is random in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import evener  # 1


class Signals(IterableDataset[tuple[Tensor, Tensor]]):
    """Waves of one of three shapes, for ever."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw, time = torch.Generator().manual_seed(2), torch.linspace(0, 6.28, 32)
        while True:
            kind, phase = torch.randint(0, 3, (), generator=draw), 6.28 * torch.rand((), generator=draw)
            wave = torch.stack(
                (torch.sin(time + phase), torch.sin(2 * time + phase), torch.sign(torch.sin(time + phase)))
            )
            yield wave[kind] + 0.3 * torch.randn(32, generator=draw), kind


def main() -> None:
    """Train on the first batches of it."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    loader = DataLoader(Signals(), batch_size=32)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = run.prepare(model, optimizer, loader)  # 3
    for step, (signal, kind) in enumerate(islice(loader, 60), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(signal), kind)
        torch.autograd.backward(loss)
        optimizer.step()
        shown = run.mean(loss)  # 4
        if step % 20 == 0:
            print(f"step {step}  loss {shown:.4f}")


if __name__ == "__main__":
    main()
