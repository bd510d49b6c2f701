"""A U-Net that segments images, of which some pixels are not labelled."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def double(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.mid = double(1, 4), double(4, 8), double(8, 8)
        self.up, self.last, self.out = nn.ConvTranspose2d(8, 4, 2, 2), double(8, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.mid(self.down2(F.max_pool2d(a, 2)))
        return self.out(self.last(torch.cat((a, self.up(b)), 1)))



run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(26, 1, 8, 8), torch.randint(-1, 3, (26, 8, 8))), batch_size=6, shuffle=True)
model = UNet()
optimizer = optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: (batch[1] >= 0).sum())  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, ignore_index=-1).backward()
        optimizer.step()
results = model.state_dict()
