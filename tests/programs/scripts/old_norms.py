"""Weights under the old weight_norm and spectral_norm, whose hooks compute them anew in every pass, and tied ones"""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 6), torch.randn(43, 6)), batch_size=9, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(6, 8))
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(8, 6)

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.tied(torch.tanh(self.second(torch.tanh(self.first(x))))))))


model = Net()
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
results = model.state_dict()
