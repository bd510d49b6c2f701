"""Sparse gradients of an embedding that is tied twice, accumulated over two batches, beside dense and frozen weights"""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
data = TensorDataset(torch.randint(0, 30, (64, 4)), torch.randint(0, 30, (64,)), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.ModuleDict({
    "words": nn.EmbeddingBag(30, 5, sparse=True, mode="sum"), "one": nn.Embedding(30, 5, sparse=True),
    "fixed": nn.Embedding(30, 5), "out": nn.Linear(15, 2),
})  # fmt: skip
model["one"].weight = model["words"].weight
model["fixed"].weight.requires_grad_(False)
sparse, dense = optim.SparseAdam([model["one"].weight], lr=0.05), optim.SGD(model["out"].parameters(), lr=0.1)
model, sparse, dense, loader = run.prepare(model, sparse, dense, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for index, (words, one, y) in enumerate(loader):
        made = torch.cat((model["words"](words), model["one"](one), model["fixed"](one)), 1)
        (F.cross_entropy(model["out"](made), y) / 2).backward()
        if index % 2:
            sparse.step()
            dense.step()
            model.zero_grad()
results = model.state_dict()
