"""Labelled and unlabelled batches side by side."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
labelled = DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,))), batch_size=6, shuffle=True)
unlabelled = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=6, shuffle=True)
model = nn.Linear(6, 3)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, labelled, unlabelled = run.prepare(model, optimizer, labelled, unlabelled)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x, y), (u,) in zip(labelled, unlabelled):
        optimizer.zero_grad()
        guess = model(u).softmax(1)
        loss = F.cross_entropy(model(x), y) - 0.1 * (guess * guess.log()).sum(1).mean()
        loss.backward()
        optimizer.step()
results = model.state_dict()
