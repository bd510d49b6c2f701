"""A learning rate that falls when the validation loss does."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 2)), batch_size=9, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(21, 6), torch.randn(21, 2)), batch_size=8)
model = nn.Linear(6, 2)
optimizer = optim.SGD(model.parameters(), lr=0.5)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
model, optimizer, loader, valid = run.prepare(model, optimizer, loader, valid)  # added
for epoch in run.epochs(4):  # was: for epoch in range(4):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    total = sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in valid)
    total = run.sum(total)  # added
    scheduler.step(total)
results = model.state_dict()
