"""Two losses of different kinds, a regulariser and label smoothing; parameters in groups with rates of their own"""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
x = torch.randn(40, 6)
data = TensorDataset(x, x[:, :4].argmax(1), x.norm(dim=1, keepdim=True))
loader = DataLoader(data, batch_size=9, shuffle=True, drop_last=True)
body, classes, length = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 1)
model = nn.ModuleList([body, classes, length])
optimizer = torch.optim.SGD([
    {"params": body.parameters(), "lr": 0.05, "momentum": 0.9},
    {"params": [*classes.parameters(), *length.parameters()], "weight_decay": 1e-2}], lr=0.1)  # fmt: skip
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.1], total_steps=3 * len(loader))
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for inputs, targets, sizes in loader:
        hidden = body(inputs).tanh()
        loss = F.cross_entropy(classes(hidden), targets, label_smoothing=0.1) + F.huber_loss(length(hidden), sizes)
        loss = loss + 1e-3 * sum(weight.abs().sum() for weight in model.parameters())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        scheduler.step()
results = model.state_dict()
