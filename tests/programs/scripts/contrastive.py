"""A contrastive model of pairs, in the manner of CLIP: the loss compares every sample with every other one."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
        self.text = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 6))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(50, 12), torch.randn(50, 9)), batch_size=12, shuffle=True)
model = Pairs()
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for image, text in loader:
        image, text = model(image, text)
        image, text = evener.gather(image), evener.gather(text)  # added
        logits = model.logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()
