"""A siamese network with a triplet loss, in the manner of PyTorch's example."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(40, 3, 1, 8, 8)), batch_size=7, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
optimizer = optim.Adadelta(model.parameters())
criterion = nn.TripletMarginLoss(margin=0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (images,) in loader:
        optimizer.zero_grad()
        anchor, positive, negative = (model(images[:, i]) for i in range(3))
        criterion(anchor, positive, negative).backward()
        optimizer.step()
results = model.state_dict()
