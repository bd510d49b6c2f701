"""Word vectors by skip-grams, with sparse gradients."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randint(0, 30, (60,)), torch.randint(0, 30, (60,))), batch_size=8, shuffle=True)
model = nn.ModuleDict({"word": nn.Embedding(30, 5, sparse=True), "context": nn.Embedding(30, 5, sparse=True)})
optimizer = optim.SparseAdam(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for word, context in loader:
        optimizer.zero_grad()
        score = (model["word"](word) * model["context"](context)).sum(1)
        (-F.logsigmoid(score).mean()).backward()
        optimizer.step()
results = model.state_dict()
