"""A script of Accelerate's, in the manner of its examples"""
# needs: accelerate

import evener  # added
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
accelerator = Accelerator(cpu=True)
x = torch.randn(50, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
results = accelerator.unwrap_model(model).state_dict()
