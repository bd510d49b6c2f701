"""A quasi-Newton optimiser with a line search, which calls a closure several times a step."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=20)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
results = model.state_dict()
