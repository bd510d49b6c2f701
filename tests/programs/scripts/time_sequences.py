"""Sequences predicted by LSTM cells and LBFGS on all data at once, in the manner of PyTorch's example."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
data = torch.sin(torch.arange(20.0) / 3 + torch.randn(7, 1))
x, y = data[:, :-1], data[:, 1:]
model = nn.ModuleDict({"cell": nn.LSTMCell(1, 5), "out": nn.Linear(5, 1)})
optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=5)
model, optimizer = run.prepare(model, optimizer)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    def closure():
        optimizer.zero_grad()
        hidden, found = None, []
        for value in x.split(1, dim=1):
            hidden = model["cell"](value, hidden)
            found.append(model["out"](hidden[0]))
        loss = F.mse_loss(torch.cat(found, 1), y)
        loss.backward()
        return loss

    optimizer.step(closure)
results = model.state_dict()
