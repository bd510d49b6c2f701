"""A sampler that prefers some samples, and batches of lengths that are alike."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
data = TensorDataset(torch.randn(43, 6), torch.randn(43, 2))
sampler = torch.utils.data.WeightedRandomSampler(torch.rand(43), 40)
loader = DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 7, drop_last=False))
model = nn.Linear(6, 2)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
results = model.state_dict()
