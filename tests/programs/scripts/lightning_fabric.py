"""Fabric's loop, with gradients that are accumulated without being exchanged"""
# needs: lightning

import torch
import torch.nn.functional as F
from evener.frontends.integrations.lightning import EvenerFabricStrategy  # added
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", strategy=EvenerFabricStrategy())  # was: fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
x = torch.randn(50, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(loader)
for epoch in range(2):
    for index, (inputs, targets) in enumerate(loader):
        is_accumulating = index % 2 == 0 and index + 1 < len(loader)
        with fabric.no_backward_sync(model, enabled=is_accumulating) if fabric.world_size > 1 else fabric.autocast():
            fabric.backward(F.cross_entropy(model(inputs), targets))
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
results = net.state_dict()
