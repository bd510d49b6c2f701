"""A network with complex weights and a complex buffer, as signals and Fourier features have."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.mix = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        z = torch.tanh(self.inner(x)).to(self.mix.dtype) @ self.mix * self.phase
        return z.abs().sum(1, keepdim=True)


data = TensorDataset(torch.randn(64, 4), torch.rand(64, 1))
model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
results = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in model.state_dict().items()}
