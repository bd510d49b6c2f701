"""A student that learns from a frozen teacher, and a hook that clips each gradient."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6)), batch_size=9, shuffle=True)
teacher = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False).eval()
model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
for parameter in model.parameters():
    parameter.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
teacher, model, optimizer, loader = run.prepare(teacher, model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        F.kl_div(model(x).log_softmax(1), wanted, reduction="batchmean").backward()
        optimizer.step()
results = model.state_dict()
