"""A table of features by the index of a sample; every node changes only the rows of its own samples."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, torch.arange(48)), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
table = F.normalize(torch.randn(48, 4), dim=1)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, index in loader:
        z = F.normalize(model(x), dim=1)
        loss = F.cross_entropy(z @ table.t() / 0.1, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            table[index] = F.normalize(0.5 * table[index] + 0.5 * z, dim=1)
results = {**model.state_dict(), "table": table}
