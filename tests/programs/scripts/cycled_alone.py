"""Batches of one pass, the last one small, that itertools.cycle gives again until there were steps enough."""

from itertools import cycle, islice

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(75, 6), torch.randn(75, 2)), batch_size=9)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for x, y in islice(cycle(loader), 30):
    optimizer.zero_grad()
    F.mse_loss(model(x + 1), y).backward()
    optimizer.step()
results = model.state_dict()
