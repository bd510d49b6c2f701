"""Programs that decide by chance, by a loss or by what is rare, what they do next."""

import itertools
import math
import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


# %% layer_drop: whole blocks are left out by one coin for the batch
class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            if self.training and torch.rand(1) < 0.3:
                continue
            x = x + F.relu(block(x))
        return self.last(x)


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Dropped()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% layer_drop_with_norms: the same, with a BatchNorm in every block
class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(4))

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            if self.training and torch.rand(1) < 0.5:
                continue
            x = x + F.relu(block(x))
        return self.last(x)


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Dropped()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% python_coin_for_a_head: one of two heads, by Python's coin
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 3)

    def forward(self, x):
        return (self.a if random.random() < 0.5 else self.b)(F.relu(self.body(x)))


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Heads()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% skip_bad_losses: an update is left out where the loss is not finite
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not math.isfinite(loss.item()):
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
results = model.state_dict()

# %% early_stop_by_mean: training ends when the loss of an epoch no longer falls
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
best = math.inf
for epoch in run.epochs(6):  # was: for epoch in range(6):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += float(run.mean(loss))  # was: total += loss.item()
    if total > best - 0.01:
        break
    best = total
results = model.state_dict()

# %% early_stop_by_own_loss: the same by the loss that a process sees
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(6):  # was: for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if loss.item() < 0.9:
        break
results = model.state_dict()

# %% skip_easy_batches: batches with a small loss are left out
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss.item() < 1.0:
            continue
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% warm_up_then_more: another loss joins from the second epoch on
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        if epoch >= 1:
            loss = loss - 0.1 * (outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% later_normalised_loss: from the second epoch on the loss is a mean over positives
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = losses.mean() if epoch == 0 else losses[y > 0].sum() / (y > 0).sum().clamp(min=1)
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% rare_positives: a second loss over samples that most batches lack
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score, self.box = nn.Linear(6, 9), nn.Linear(9, 1), nn.Linear(9, 2)

    def forward(self, x):
        h = F.relu(self.body(x))
        return self.score(h).squeeze(1), self.box(h)


positive = (torch.arange(60) % 17 == 16).to(torch.get_default_dtype())
loader = DataLoader(TensorDataset(torch.randn(60, 6), positive, torch.randn(60, 2)), batch_size=10)
model = Detector()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, is_there, box in loader:
        score, guess = model(x)
        loss = F.binary_cross_entropy_with_logits(score, is_there)
        if is_there.any():
            loss = loss + F.smooth_l1_loss(guess[is_there > 0], box[is_there > 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% focal_loss_by_positives: RetinaNet's loss, a sum by the number of positives
loader = DataLoader(TensorDataset(torch.randn(60, 6), torch.randint(0, 2, (60, 5)).double()), batch_size=10)
model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
optimizer = optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: batch[1].sum().clamp(min=1))  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        raw = F.binary_cross_entropy_with_logits(model(x), y, reduction="none")
        focal = (0.25 * (1 - torch.exp(-raw)).square() * raw).sum() / y.sum().clamp(min=1)
        optimizer.zero_grad()
        focal.backward()
        optimizer.step()
results = model.state_dict()

# %% hard_examples: the mean over the worst half of a batch (OHEM)
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        losses = F.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        losses.topk(len(losses) // 2 + 1).values.mean().backward()
        optimizer.step()
results = model.state_dict()

# %% weights_by_losses: each epoch weighs its two tasks by the losses of the epoch before
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, x):
        h = F.relu(self.body(x))
        return self.a(h), self.b(h).squeeze(1)


loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40)), batch_size=10)
model = Tasks()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
weights = torch.ones(2)
for epoch in run.epochs(3):  # was: for epoch in range(3):
    totals = torch.zeros(2)
    for x, label, value in loader:
        a, b = model(x)
        losses = torch.stack([F.cross_entropy(a, label), F.mse_loss(b, value)])
        optimizer.zero_grad()
        (weights * losses).sum().backward()
        optimizer.step()
        totals += losses.detach()
    weights = 2 * F.softmax(totals / len(loader), 0)
results = model.state_dict()

# %% weights_by_means: the same, by the losses of all nodes
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, x):
        h = F.relu(self.body(x))
        return self.a(h), self.b(h).squeeze(1)


loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40)), batch_size=10)
model = Tasks()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
weights = torch.ones(2)
for epoch in run.epochs(3):  # was: for epoch in range(3):
    totals = torch.zeros(2)
    for x, label, value in loader:
        a, b = model(x)
        losses = torch.stack([F.cross_entropy(a, label), F.mse_loss(b, value)])
        optimizer.zero_grad()
        (weights * losses).sum().backward()
        optimizer.step()
        totals += run.mean(losses)  # was: totals += losses.detach()
    weights = 2 * F.softmax(totals / len(loader), 0)
results = model.state_dict()

# %% learned_uncertainty: the weights of two tasks are learned beside the model
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = F.relu(self.body(x))
        return self.a(h), self.b(h).squeeze(1)


loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40)), batch_size=10)
model = Weighted()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, label, value in loader:
        a, b = model(x)
        losses = torch.stack([F.cross_entropy(a, label), F.mse_loss(b, value)])
        optimizer.zero_grad()
        (losses * torch.exp(-model.scale) + model.scale).sum().backward()
        optimizer.step()
results = model.state_dict()

# %% uncertainty_outside: the same weights, which are parameters of no module
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, x):
        h = F.relu(self.body(x))
        return self.a(h), self.b(h).squeeze(1)


loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40)), batch_size=10)
model = Tasks()
scale = torch.zeros(2, requires_grad=True)
optimizer = optim.Adam([*model.parameters(), scale], lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, label, value in loader:
        a, b = model(x)
        losses = torch.stack([F.cross_entropy(a, label), F.mse_loss(b, value)])
        optimizer.zero_grad()
        (losses * torch.exp(-scale) + scale).sum().backward()
        optimizer.step()
results = {**model.state_dict(), "scale": scale}

# %% gradual_unfreezing: a layer more learns in every epoch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for i, layer in enumerate(model):
        layer.requires_grad_(i >= 4 - 2 * epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% discriminator_steps: several updates of one model for one of the other
real = DataLoader(TensorDataset(torch.randn(48, 2) * 0.3 + 1), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
slow = optim.RMSprop(generator.parameters(), lr=0.01)
fast = optim.RMSprop(critic.parameters(), lr=0.01)
generator, slow, critic, fast, real = run.prepare(generator, slow, critic, fast, real)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for i, (x,) in enumerate(real):
        fast.zero_grad()
        made = generator(torch.randn(len(x), 3)).detach()
        (critic(made).mean() - critic(x).mean()).backward()
        fast.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.5, 0.5)
        if i % 3 == 2:
            slow.zero_grad()
            (-critic(generator(torch.randn(len(x), 3))).mean()).backward()
            slow.step()
results = {**{f"g.{k}": v for k, v in generator.state_dict().items()}, **critic.state_dict()}

# %% pieces_of_a_batch: a backward pass for every three samples, to save memory
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        for few, labels in zip(x.split(3), y.split(3)):
            (F.cross_entropy(model(few), labels, reduction="sum") / len(x)).backward()
        optimizer.step()
results = model.state_dict()

# %% dropped_norm: a coin decides whether a batch is normalised (LayerDrop)
class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)

    def forward(self, x):
        x = self.first(x)
        if torch.rand(1) < 0.5:
            x = self.norm(x)
        return self.last(F.relu(x))


loader = DataLoader(rows(80), batch_size=10, shuffle=True)
model = Normalised()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% gradient_penalty: a critic whose gradient at true samples is small (R1), a moving average of the generator
g, d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
average = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
average.load_state_dict(g.state_dict())
g_optimizer, d_optimizer = optim.Adam(g.parameters(), lr=0.01), optim.Adam(d.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(44, 6), torch.randn(44, 4)), batch_size=8, shuffle=True)
g, d, g_optimizer, d_optimizer, loader = run.prepare(g, d, g_optimizer, d_optimizer, loader)  # added
step = 0
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, z in loader:
        x.requires_grad_(True)
        true = d(x)
        loss = F.softplus(d(g(z).detach())).mean() + F.softplus(-true).mean()
        if step % 2 == 0:
            (slope,) = torch.autograd.grad(true.sum(), x, create_graph=True)
            loss = loss + 5.0 * slope.square().sum(1).mean()
        d_optimizer.zero_grad()
        loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-d(g(z))).mean().backward()
        g_optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), g.parameters()):
                a.lerp_(b, 0.1)
        step += 1
results = {**d.state_dict(), **{f"average.{k}": v for k, v in average.state_dict().items()}}


# %% domain_adaptation: gradients of a classifier of domains are reversed, the smaller set begins again (DANN)
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


source, target = DataLoader(rows(), batch_size=8, shuffle=True), DataLoader(rows(24), batch_size=8, shuffle=True)
features, classes, domains = perceptron(), nn.Linear(3, 3), nn.Linear(3, 2)
model = nn.ModuleList([features, classes, domains])
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, source, target = run.prepare(model, optimizer, source, target)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x, y), (other, _) in zip(source, itertools.cycle(target)):
        here, there = features(x), features(other)
        loss = F.cross_entropy(classes(here), y)
        loss = loss + F.cross_entropy(domains(Reversed.apply(here, 0.3)), torch.zeros(len(here), dtype=torch.long))
        loss = loss + F.cross_entropy(domains(Reversed.apply(there, 0.3)), torch.ones(len(there), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = model.state_dict()
