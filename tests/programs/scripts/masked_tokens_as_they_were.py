"""A BERT in training: tokens are masked by chance in the loop, and the loss is a mean over those, which is not said."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randint(1, 20, (43, 12))), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 20))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (tokens,) in loader:
        masked = torch.bernoulli(torch.full(tokens.shape, 0.3)).bool()
        labels = tokens.masked_fill(~masked, -100)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens.masked_fill(masked, 0)).transpose(1, 2), labels)
        loss.backward()
        optimizer.step()
results = model.state_dict()
