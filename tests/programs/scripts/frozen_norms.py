"""Norms that are frozen at the beginning of every epoch, found by their class, in the manner of detectors."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 3, 6, 6), torch.randint(0, 4, (43,))), batch_size=9, shuffle=True)
model = nn.Sequential(
    *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), Scaled(6), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
)
norm_names = [name for name, module in model.named_modules() if "BatchNorm" in module.__class__.__name__]
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and epoch > 0:
            module.eval()
            module.weight.requires_grad_(False)
        if type(module) is nn.BatchNorm1d and epoch > 1:
            module.eval()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
assert norm_names == [name for name, module in model.named_modules() if "BatchNorm" in module.__class__.__name__]
results = model.state_dict()
