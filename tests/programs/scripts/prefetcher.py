"""Batches that are loaded ahead, in the manner of NVIDIA's examples; the last batch of an epoch is a small one."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Prefetcher:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.preload()

    def preload(self):
        x, self.y = next(self.batches, (None, None))
        self.x = None if x is None else x.float().sub(0.1).div(1.5).double()

    def next(self):
        x, y = self.x, self.y
        self.preload()
        return x, y


run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(39, 6), torch.randn(39, 2)), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
losses = torch.zeros(())
for epoch in run.epochs(3):  # was: for epoch in range(3):
    prefetcher = Prefetcher(loader)
    x, y = prefetcher.next()
    while x is not None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loss = run.mean(loss)  # added
        losses += loss.detach()
        x, y = prefetcher.next()
results = {**model.state_dict(), "losses": losses}
