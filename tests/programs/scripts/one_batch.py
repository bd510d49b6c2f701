"""A model that is tried on one batch until it knows that by heart, before it is trained on all."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(39, 6), torch.randn(39, 2)), batch_size=9)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
x, y = next(iter(loader))
for step in range(12):
    optimizer.zero_grad()
    F.mse_loss(model(x * 0.5), y).backward()
    optimizer.step()
for step in range(5):
    x, y = next(iter(loader))
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
for a, b in loader:
    optimizer.zero_grad()
    F.mse_loss(model(a), b).backward()
    optimizer.step()
for step in range(3):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
results = model.state_dict()
