"""A front end for a trainer of another library, which owns its loop: start it with `evener run` on uneven nodes.

    python 19_own_trainer.py                                  # the trainer by itself, on one process
    evener run 19_own_trainer.py --local-nodes 1,0.5          # the same weights, on two nodes

docs/adding-a-front-end.md explains it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evener


class Trainer:
    """Stands for a trainer of another library, with methods that a subclass may replace.

    Args:
        model: with any layers.
        optimizer: of its weights.
        batch_size: samples of a step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch_size: int) -> None:
        self.model, self.optimizer, self.batch_size = model, optimizer, batch_size
        self.history: list[tuple[float, float]] = []

    def fit(self, data: Dataset[tuple[Tensor, ...]], validation: Dataset[tuple[Tensor, ...]], epochs: int) -> None:
        """Train; append (training loss, validation accuracy) of every epoch to `history`."""
        batches, tests = self.loader(data, shuffle=True), self.loader(validation, shuffle=False)
        for epoch in range(epochs):
            self.begin_epoch(epoch, epochs)
            self.model.train()
            losses = [self.train_batch(x, y) for x, y in batches]
            self.model.eval()
            with torch.no_grad():
                right = sum(self.total(int((self.model(x).argmax(1) == y).sum())) for x, y in tests)
            self.history.append((sum(losses) / len(losses), right / len(tests.dataset)))  # type: ignore[arg-type]
        self.end()

    def train_batch(self, x: Tensor, y: Tensor) -> float:
        """Perform a step; return its loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return self.mean(loss)

    def loader(self, data: Dataset[tuple[Tensor, ...]], *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        """Return the batches of `data`."""
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle)

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Begin `epoch` of `epochs`."""

    def mean(self, loss: Tensor) -> float:
        """Return the mean loss of a batch as a number."""
        return float(loss)

    def total(self, count: int) -> int:
        """Return a count over all samples of a batch."""
        return count

    def end(self) -> None:
        """End the training."""


class EvenerTrainer(Trainer):
    """The front end: the same trainer, on every node of a run. Its arguments are those of Trainer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch_size: int) -> None:
        self.run = evener.join()
        model, optimizer = self.run.prepare(model, optimizer)
        super().__init__(model, optimizer, batch_size)

    def loader(self, data: Dataset[tuple[Tensor, ...]], *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        """Return this node's part of every batch."""
        prepared: DataLoader[tuple[Tensor, ...]] = self.run.prepare(super().loader(data, shuffle=shuffle))
        return prepared

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Begin an epoch on all nodes, with the same random numbers."""
        self.run.begin_epoch(epoch, is_last=epoch + 1 == epochs)

    def mean(self, loss: Tensor) -> float:
        """Return the mean loss over the parts of all nodes."""
        return float(self.run.mean(loss))

    def total(self, count: int) -> int:
        """Return the sum of the counts of all nodes."""
        return int(self.run.sum(count))

    def end(self) -> None:
        """Write the weights, on one node."""
        if self.run.leader:
            torch.save(self.run.state(self.model), "model.pt")


def main() -> None:
    """Learn which of ten points in the plane is the nearest."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(1300, 2)
    y = torch.cdist(x, torch.randn(10, 2)).argmin(1)
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    trainer = EvenerTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch_size=100)
    trainer.fit(TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:]), epochs=5)
    if trainer.run.leader:
        for epoch, (loss, accuracy) in enumerate(trainer.history):
            print(f"epoch {epoch + 1}: loss {loss:.9f}, {accuracy:.1%} right")


if __name__ == "__main__":
    main()
