"""Model-agnostic meta-learning (Finn et al., 2017): an inner step by `autograd.grad`, differentiated again."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
inputs = torch.randn(32, 6, 4)
targets = inputs.sum(2, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        losses = []
        for xi, yi in zip(x, y):
            fast = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, fast, xi[:3]), yi[:3])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads)}
            losses.append(F.mse_loss(functional_call(model, fast, xi[3:]), yi[3:]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
results = model.state_dict()
