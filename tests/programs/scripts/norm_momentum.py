"""Norms whose momentum changes from epoch to epoch, in the manner of PointNet++, and an average that is none of them."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 3, 10), torch.randn(43, 2)), batch_size=9, shuffle=True)
model = nn.Sequential(
    *(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3)),
    *(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.SyncBatchNorm(4), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(24, 2)),
)
nn.init.normal_(model[4].bias)
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added


def set_momentum(module, value):
    if isinstance(module, nn.BatchNorm1d | nn.SyncBatchNorm | nn.InstanceNorm1d):
        module.momentum = value


for epoch in run.epochs(3):  # was: for epoch in range(3):
    model.apply(lambda module, value=max(0.5 * 0.5**epoch, 0.01): set_momentum(module, value))
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
results = model.state_dict()
