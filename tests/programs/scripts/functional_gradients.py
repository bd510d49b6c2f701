"""Gradients that are returned and not kept, which nobody averages."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 2)), batch_size=9, shuffle=True)
model = nn.Linear(6, 2)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        found = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, g in zip(model.parameters(), found):
            p.grad = g
        optimizer.step()
results = model.state_dict()
