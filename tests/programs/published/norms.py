"""Programs that look for normalisation layers by their class, and change them."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def images(count=40, channels=3, side=8, classes=3):
    return TensorDataset(torch.randn(count, channels, side, side), torch.randint(0, classes, (count,)))


def convnet(classes=3):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )


def rows(count=44, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


# %% frozen_statistics: fine-tuning that keeps the running statistics of every norm, each epoch anew
loader = DataLoader(images(), batch_size=10, shuffle=True)
model = convnet()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% frozen_norms_without_gradient: norms that neither learn nor follow their data
loader = DataLoader(images(), batch_size=10, shuffle=True)
model = convnet()
for module in model.modules():
    if isinstance(module, nn.BatchNorm2d):
        module.weight.requires_grad_(False)
        module.bias.requires_grad_(False)
optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    model.apply(lambda m: m.eval() if isinstance(m, nn.modules.batchnorm._BatchNorm) else None)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% momentum_schedule: a momentum of the running statistics that falls with the epochs
loader = DataLoader(rows(), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.5 / (epoch + 1)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% cumulative_statistics: statistics that are a plain mean over all batches
loader = DataLoader(rows(), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9, momentum=None), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% network_slimming: an L1 penalty on the scale of every norm
loader = DataLoader(images(), batch_size=8, shuffle=True)
model = convnet()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                loss = loss + 0.01 * module.weight.abs().sum()
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% slimming_by_gradient: the same penalty, added to the gradients after backward
loader = DataLoader(images(), batch_size=8, shuffle=True)
model = convnet()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.grad.data.add_(0.01 * torch.sign(module.weight.data))
        optimizer.step()
results = model.state_dict()

# %% no_decay_for_norms: parameter groups by the class of the layer
loader = DataLoader(images(), batch_size=8, shuffle=True)
model = convnet()
decayed, free = [], []
for module in model.modules():
    for name, parameter in module.named_parameters(recurse=False):
        is_free = isinstance(module, nn.BatchNorm2d) or name == "bias"
        (free if is_free else decayed).append(parameter)
optimizer = optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}], lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% zero_gamma: the last norm of every residual block begins with zeros
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm1 = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second, self.norm2 = nn.Linear(width, width), nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


loader = DataLoader(rows(), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% sam_without_statistics: sharpness-aware minimisation whose second pass leaves the statistics alone
loader = DataLoader(rows(), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added


def disable_running_stats(module):
    if isinstance(module, nn.BatchNorm1d):
        module.backup_momentum = module.momentum
        module.momentum = 0


def enable_running_stats(module):
    if isinstance(module, nn.BatchNorm1d) and hasattr(module, "backup_momentum"):
        module.momentum = module.backup_momentum


for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        model.apply(enable_running_stats)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            steps = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), steps):
                p.add_(e)
        optimizer.zero_grad()
        model.apply(disable_running_stats)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
results = model.state_dict()

# %% swa: averaged weights, whose statistics are computed anew at the end
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

loader = DataLoader(rows(), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
averaged = AveragedModel(model)
schedule = SWALR(optimizer, swa_lr=0.02)
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    averaged.update_parameters(model)
    schedule.step()
update_bn(loader, averaged)
results = averaged.state_dict()

# %% reset_statistics: running statistics that begin anew in every epoch
loader = DataLoader(images(), batch_size=10, shuffle=True)
model = convnet()
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% batch_statistics_alone: norms that keep no running statistics
loader = DataLoader(images(), batch_size=10, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)
)
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% own_norm_class: a sub-class of BatchNorm with a learned mixture of two statistics
class Mixed(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.mix = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self.mix) + x * (1 - torch.sigmoid(self.mix))


loader = DataLoader(images(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), Mixed(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% hooks_on_norms: a forward hook on every norm keeps the mean of what comes out in evaluation
loader = DataLoader(rows(), batch_size=11, shuffle=True)
test_loader = DataLoader(rows(20), batch_size=20)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
means = []
for module in model.modules():
    if isinstance(module, nn.BatchNorm1d):
        module.register_forward_hook(lambda m, i, o: means.append(o.detach().mean(0)))
model.eval()
with torch.no_grad():
    for x, _ in test_loader:
        model(x)
results = {**model.state_dict(), "means": torch.stack(means)}

# %% fused_for_evaluation: after training every convolution takes its norm in
from torch.nn.utils.fusion import fuse_conv_bn_eval

loader = DataLoader(images(), batch_size=10, shuffle=True)
convolution, norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
model = nn.Sequential(convolution, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()
fused = fuse_conv_bn_eval(model[0], model[1])
results = dict(fused.state_dict())

# %% adapted_statistics: after training the statistics follow other data, the weights stay (AdaBN)
loader = DataLoader(rows(), batch_size=11, shuffle=True)
other = DataLoader(rows(22), batch_size=11)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader, other = run.prepare(model, optimizer, loader, other)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
with torch.no_grad():
    model.train()
    for x, _ in other:
        model(x)
results = model.state_dict()

# %% group_and_layer_norm: norms of a sample by itself
loader = DataLoader(images(), batch_size=10, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, affine=True),
    nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3),
)
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()
