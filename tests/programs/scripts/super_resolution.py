"""Super-resolution by sub-pixel convolution, in the manner of PyTorch's example, with workers."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(20, 1, 4, 4), torch.randn(20, 1, 8, 8)), batch_size=6, num_workers=1)
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
results = model.state_dict()
