"""Lazy layers that a first batch has materialised, in the manner of PyTorch's documentation; some weights are frozen"""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
data = TensorDataset(torch.randn(43, 1, 8, 8), torch.randint(0, 3, (43,)))
loader = DataLoader(data, batch_size=9, shuffle=True)
model = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
with torch.no_grad():
    model(data.tensors[0][:2])
model[0].bias.requires_grad_(False)
optimizer = optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()
