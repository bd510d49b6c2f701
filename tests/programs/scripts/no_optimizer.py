"""Gradient descent by hand."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 2)), batch_size=9, shuffle=True)
model = nn.Linear(6, 2)
model, loader = run.prepare(model, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
results = model.state_dict()
