"""Stochastic weight averaging, whose norms get the statistics of all data at the end; the last batch has one sample."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(37, 3, 6, 6), torch.randint(0, 4, (37,))), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
average = AveragedModel(model)
schedule = SWALR(optimizer, swa_lr=0.05)
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if epoch > 0:
        average.update_parameters(model)
        schedule.step()
update_bn(loader, average)
results = {**model.state_dict(), **average.state_dict()}
