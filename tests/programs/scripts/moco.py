"""Contrast with a queue of keys of earlier batches, by an encoder that follows slowly."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 6)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
slow = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
slow.load_state_dict(model.state_dict())
queue = F.normalize(torch.randn(16, 4), dim=1)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, slow, optimizer, loader = run.prepare(model, slow, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for one, other in loader:
        optimizer.zero_grad()
        q = F.normalize(model(one), dim=1)
        with torch.no_grad():
            for p, s in zip(model.parameters(), slow.parameters()):
                s.data = 0.9 * s.data + 0.1 * p.data
            k = F.normalize(slow(other.to(q.dtype)), dim=1)
        logits = torch.cat(((q * k).sum(1, keepdim=True), q @ queue.to(q.dtype).t()), 1) / 0.2
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        optimizer.step()
        k = evener.gather(k)  # added
        queue = torch.cat((queue[len(k) :], k))
results = {**model.state_dict(), "queue": queue}
