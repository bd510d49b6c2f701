"""A network of timm with its own optimiser, schedule, mixup and moving average"""
# needs: timm

import evener  # added
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()  # added
data = TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(0, 5, (24,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = timm.create_model("resnet10t", num_classes=5)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
ema = ModelEmaV3(model, decay=0.9)
scheduler = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=1e-4)
smooth = Mixup(mixup_alpha=0.0, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=5)
criterion = SoftTargetCrossEntropy()
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    for images, targets in loader:
        targets = torch.nn.functional.one_hot(targets, 5).double() * 0.9 + 0.02
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    scheduler.step(epoch + 1)
results = {**model.state_dict(), **{f"ema.{name}": value for name, value in ema.module.state_dict().items()}}
