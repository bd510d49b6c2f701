"""A critic with a gradient penalty: the loss holds a gradient with respect to its input."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 6)), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for real, fake in loader:
        optimizer.zero_grad()
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = model(fake).mean() - model(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
results = model.state_dict()
