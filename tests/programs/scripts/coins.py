"""Coins that decide on whole batches in the loop, a strength of a beta distribution, and noise of a weight's shape."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(75, 6), torch.randint(0, 4, (75,))), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        if torch.rand(1) < 0.5:
            strength = torch.distributions.Beta(1.0, 1.0).sample()
            x = strength * x + (1 - strength) * x.flip(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if torch.rand(()) < 0.3:
            loss = loss + (torch.randn_like(model[0].weight) * model[0].weight).mean()
        loss.backward()
        optimizer.step()
results = model.state_dict()
