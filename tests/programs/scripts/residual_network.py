"""A residual network in the manner of PyTorch's ImageNet example, with averages and top-k accuracy."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)
        self.conv2, self.bn2 = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.fc = nn.Conv2d(3, 4, 3), nn.Sequential(Block(4), Block(4)), nn.Linear(4, 6)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))



run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(30, 3, 8, 8), torch.randint(0, 6, (30,))), batch_size=7, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(17, 3, 8, 8), torch.randint(0, 6, (17,))), batch_size=5)
model = Net()
optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
model, optimizer, loader, valid = run.prepare(model, optimizer, loader, valid)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    for images, target in loader:
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right, number = torch.zeros(2), 0
    with torch.no_grad():
        for images, target in valid:
            hits = model(images).topk(3)[1] == target[:, None]
            right += torch.stack((hits[:, 0].sum(), hits.sum())).to(right.dtype)
            number += len(target)
    right, number = run.sum(right), run.sum(number)  # added
    scheduler.step()
results = {**model.state_dict(), "right": right / number}
