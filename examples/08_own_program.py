"""A training script of your own on uneven nodes: five of its lines were changed.

    python examples/08_own_program.py                                   alone, as it was
    evener run examples/08_own_program.py --local-nodes 1.0,0.5         on a fast and a slow node: the same losses

Handwritten digits, a convolutional network with BatchNorm, a schedule, an evaluation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # 1
from evener.data.digits import load_digits, split_digits


def main() -> None:
    """Train, evaluate, save."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    images, labels = load_digits()
    x, y = torch.from_numpy(images).float().unsqueeze(1) / 16, torch.from_numpy(labels).long()
    train, test = (TensorDataset(x[part], y[part]) for part in split_digits(labels))
    train_loader = DataLoader(train, batch_size=64, shuffle=True)
    test_loader = DataLoader(test, batch_size=128)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_loader, test_loader = run.prepare(model, optimizer, train_loader, test_loader)  # 3
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    for epoch in run.epochs(4):  # 4
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            torch.autograd.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                right += int((model(inputs).argmax(1) == targets).sum())
        print(f"epoch {epoch + 1}  right {run.sum(right)} of {len(test)}")  # 5
    if run.leader:
        torch.save(run.state(model), "digits.pt")


if __name__ == "__main__":
    main()
