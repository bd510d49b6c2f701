"""Segmentation with torchvision's LR-ASPP, in the manner of its reference script; every pixel is labelled"""

import evener  # added
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

run = evener.join()  # added
data = TensorDataset(torch.randn(12, 3, 32, 32), torch.randint(0, 4, (12, 32, 32)))
loader = DataLoader(data, batch_size=6, shuffle=True)
model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
model.train()
for epoch in run.epochs(1):  # was: for epoch in range(1):
    for images, masks in loader:
        loss = F.cross_entropy(model(images)["out"], masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()
