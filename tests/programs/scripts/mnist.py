"""Digits by a convolutional network, in the manner of PyTorch's MNIST example."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import evener  # added


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def test(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(1).eq(target).sum().item()
    return loss, correct


run = evener.join()  # added
train = TensorDataset(torch.randn(101, 1, 12, 12), torch.randint(0, 10, (101,)))
train_loader = DataLoader(train, batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(*train[:33]), batch_size=8)
model = Net()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
model, optimizer, train_loader, test_loader = run.prepare(model, optimizer, train_loader, test_loader)  # added
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    loss, correct = test(model, test_loader)
    loss, correct = run.sum(loss), run.sum(correct)  # added
    scheduler.step()
results = {**model.state_dict(), "loss": torch.tensor(loss), "correct": torch.tensor(correct)}
