"""A buffer of earlier samples; every node keeps only its own samples."""

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=12)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
replay = deque(maxlen=40)
choose = random.Random(0)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        if replay:
            chosen = choose.choices(replay, k=8)
            again = torch.stack([image for image, _ in chosen])
            loss = loss + F.cross_entropy(model(again), torch.stack([label for _, label in chosen]))
        replay.extend(zip(images, labels, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()
