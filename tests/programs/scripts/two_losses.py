"""Several heads, several losses, and a penalty of the weights, with nested outputs."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randint(0, 3, (43,)), torch.randn(43, 1)), batch_size=9)
model = nn.ModuleDict({"trunk": nn.Linear(6, 8), "class": nn.Linear(8, 3), "value": nn.Linear(8, 1)})
optimizer = optim.Adam([{"params": model["trunk"].parameters(), "lr": 1e-3}, {"params": model["value"].parameters()},
                        {"params": model["class"].parameters(), "lr": 1e-2}])
scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs=2, steps_per_epoch=len(loader))
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y, v in loader:
        optimizer.zero_grad()
        h = model["trunk"](x).relu()
        loss = F.cross_entropy(model["class"](h), y, label_smoothing=0.1) + 0.5 * F.huber_loss(model["value"](h), v)
        loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        scheduler.step()
results = model.state_dict()
