"""A program that evaluates amid an epoch, and sums what it trained on before and what it evaluated after that."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
x = torch.randn(46, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
loader, tests = DataLoader(data, batch_size=10), DataLoader(TensorDataset(*data[:17]), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader, tests = run.prepare(model, optimizer, loader, tests)  # added


def evaluate():
    model.eval()
    loss = right = number = 0.0
    with torch.no_grad():
        for x, y in tests:
            output = model(x)
            loss += F.cross_entropy(output, y, reduction="sum").item()
            right += output.argmax(1).eq(y).sum().item()
            number += len(y)
    loss, right, number = run.sum(loss), run.sum(right), run.sum(number)  # added
    model.train()
    return [loss, right, number]


seen, measured = [], []
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right, number = output.argmax(1).eq(y).sum(), len(y)
        right, number = run.sum(right), run.sum(number)  # added
        seen += [float(right), number]
        if step % 2:
            measured += evaluate()
results = {**model.state_dict(), "seen": torch.tensor(seen), "measured": torch.tensor(measured)}
