"""A masked autoencoder that hides each patch by chance: a mean over hidden patches, of which samples have unequal numbers."""

import evener  # added
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, patches):
        hidden = torch.rand(patches.shape[:2]) < 0.5
        made = self.decoder(self.encoder(patches * ~hidden[..., None]).tanh())
        error = (made - patches).square().mean(-1)
        return (error * hidden).sum() / hidden.sum()


run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(43, 5, 6)), batch_size=9, shuffle=True)
model = Masked()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (patches,) in loader:
        optimizer.zero_grad()
        model(patches).backward()
        optimizer.step()
results = model.state_dict()
