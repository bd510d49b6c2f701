"""Detection with torchvision's RetinaNet on images with different numbers of boxes: lists, and a dict of losses"""

import evener  # added
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

run = evener.join()  # added
data = []
for count in torch.randint(0, 4, (18,)).tolist():
    corner = torch.rand(count, 2) * 16
    boxes = torch.cat([corner, corner + 8 + torch.rand(count, 2) * 16], 1)
    data.append((torch.randn(3, 40, 40).double(), {"boxes": boxes.double(), "labels": torch.randint(0, 3, (count,))}))
order = torch.Generator().manual_seed(0)  # the model draws a number for every image
loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=lambda samples: tuple(zip(*samples)), generator=order)
backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 4, 1))
backbone.out_channels = 16
anchors = AnchorGenerator(sizes=((8, 16),), aspect_ratios=((1.0,),))
model = RetinaNet(backbone, 3, min_size=40, max_size=40, anchor_generator=anchors)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for images, targets in loader:
        losses = model(list(images), list(targets))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
results = model.state_dict()
