"""REINFORCE in the manner of PyTorch's example: no loader, every node plays the same episodes."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(dim=-1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = run.prepare(model, optimizer)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    state, losses = torch.randn(4), []
    for _ in range(6):
        chosen = torch.distributions.Categorical(model(state))
        action = chosen.sample()
        state = torch.tanh(state + 0.1 * action + 0.01 * torch.randn(4))
        losses.append(-chosen.log_prob(action) * state.sum().detach())
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    optimizer.step()
results = model.state_dict()
