"""Weights under a norm, old and new, and statistics that are frozen."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 2)), batch_size=9, shuffle=True)
frozen = nn.BatchNorm1d(8).eval()
model = nn.Sequential(
    nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), frozen, nn.Tanh(),
    nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)),
)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model[1].eval()
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
results = model.state_dict()
