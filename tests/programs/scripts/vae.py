"""A variational autoencoder in the manner of PyTorch's example: its loss is a sum over samples and pixels."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 36)

    def forward(self, x, noise):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.rand(50, 36), torch.randn(50, 4)), batch_size=12, shuffle=True)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(model, optimizer, loader, count="sum")  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for data, noise in loader:
        optimizer.zero_grad()
        loss = loss_function(*[(r, data, m, v) for r, m, v in [model(data, noise)]][0])
        loss.backward()
        optimizer.step()
results = model.state_dict()
