"""Classes that count differently, which is not said."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randint(0, 3, (43,))), batch_size=9, shuffle=True)
model = nn.Linear(6, 3)
weights = torch.tensor([1.0, 5.0, 20.0])
optimizer = optim.Adam(model.parameters())
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, weight=weights.to(x.dtype)).backward()
        optimizer.step()
results = model.state_dict()
