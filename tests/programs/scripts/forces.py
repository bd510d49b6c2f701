"""An energy model whose forces, gradients of the energy, are trained too."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 5, 3), torch.randn(43), torch.randn(43, 5, 3)), batch_size=9)
model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for positions, energy, forces in loader:
        optimizer.zero_grad()
        positions.requires_grad_()
        found = model(positions).sum((1, 2))
        (slope,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
        loss = F.mse_loss(found, energy) + F.mse_loss(-slope, forces)
        loss.backward()
        optimizer.step()
results = model.state_dict()
