"""A recommender with embedding bags of different lengths, wide and deep, and a weight for every sample"""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


def collate(samples):
    items, features, clicks, weights = zip(*samples)
    offsets = torch.tensor([0, *map(len, items)]).cumsum(0)[:-1]
    return torch.cat(items), offsets, torch.stack(features), torch.tensor(clicks), torch.tensor(weights)


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode="mean")
        self.wide, self.deep = nn.Linear(5, 1), nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, items, offsets, features):
        return (self.wide(features) + self.deep(torch.cat([self.bag(items, offsets), features], 1)))[:, 0]


run = evener.join()  # added
data = [(torch.randint(0, 50, (int(n),)), torch.randn(5).double(), float(n % 2), float(n)) for n in torch.randint(1, 6, (40,))]
loader = DataLoader(data, batch_size=9, shuffle=True, collate_fn=collate)
model = WideAndDeep()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: batch[-1].sum())  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for items, offsets, features, clicks, weights in loader:
        losses = F.binary_cross_entropy_with_logits(model(items, offsets, features), clicks.double(), reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()
