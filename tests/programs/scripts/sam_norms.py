"""Sharpness-aware minimisation of a model with norms, whose statistics do not move in the second pass."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 2)), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added


def disable_running_stats(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.backup_momentum = module.momentum
        module.momentum = 0


def enable_running_stats(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and hasattr(module, "backup_momentum"):
        module.momentum = module.backup_momentum


for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        model.apply(enable_running_stats)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            moved = [(p, p.grad * 0.05 / norm) for p in model.parameters()]
            for p, step in moved:
                p.add_(step)
        optimizer.zero_grad()
        model.apply(disable_running_stats)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, step in moved:
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
results = model.state_dict()
