"""Batches that are loaded once and kept in a list; the last one is small."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(102, 6), torch.randn(102, 2)), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
batches = list(loader)
losses = torch.zeros(())
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.flip(1)), y)
        loss.backward()
        optimizer.step()
        loss = run.mean(loss)  # added
        losses += loss.detach()
results = {**model.state_dict(), "losses": losses}
