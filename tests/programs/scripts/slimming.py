"""A penalty of the scales of norms, in the manner of network slimming: by hand on gradients, and in the loss."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 3, 6, 6), torch.randint(0, 4, (43,))), batch_size=9, shuffle=True)
model = nn.Sequential(
    *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)),
    *(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
)
model, loader = run.prepare(model, loader)  # added
scales = [module.weight for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
others = [weight for weight in model.parameters() if all(weight is not scale for scale in scales)]
optimizer = optim.SGD([{"params": scales, "lr": 0.05}, {"params": others, "weight_decay": 1e-2}], lr=0.1)
optimizer = run.prepare(optimizer)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                loss = loss + 1e-2 * module.weight.abs().sum()
        loss.backward()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.grad.add_(1e-2 * torch.sign(module.weight.data))
        optimizer.step()
results = model.state_dict()
