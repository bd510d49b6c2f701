"""Labelled batches beside unlabelled ones, of which there are fewer and which itertools.cycle gives again and again."""

from itertools import cycle

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(102, 6), torch.randn(102, 2)), batch_size=9, drop_last=True)
others = DataLoader(TensorDataset(torch.randn(27, 6)), batch_size=9)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader, others = run.prepare(model, optimizer, loader, others)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x, y), (u,) in zip(loader, cycle(others)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.1 * model(u * 0.9).square().mean()
        loss.backward()
        optimizer.step()
results = model.state_dict()
