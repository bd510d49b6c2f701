"""Programs that keep something beside their model: targets, centres, queues, scales."""

import copy

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def perceptron(out=3):
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, out))


# %% target_network: Q-learning on stored transitions, a target that is copied every few steps
data = TensorDataset(
    torch.randn(48, 6), torch.randint(0, 3, (48,)), torch.randn(48), torch.randn(48, 6), torch.rand(48) < 0.1
)
loader = DataLoader(data, batch_size=12, shuffle=True)
model, target = perceptron(), perceptron()
target.load_state_dict(model.state_dict())
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
step = 0
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for s, a, r, s2, is_over in loader:
        with torch.no_grad():
            wanted = r + 0.9 * target(s2).max(1).values * (~is_over)
        q = model(s).gather(1, a[:, None]).squeeze(1)
        optimizer.zero_grad()
        F.smooth_l1_loss(q, wanted).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            target.load_state_dict(model.state_dict())
results = model.state_dict()

# %% target_before_the_model: a target network that every process draws by itself, as no seed is set
torch.manual_seed(run.rank)  # was: torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)), torch.randn(48), torch.randn(48, 6))
loader = DataLoader(data, batch_size=12, shuffle=True)
target, model = perceptron(), perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for s, a, r, s2 in loader:
        with torch.no_grad():
            wanted = r + 0.9 * target(s2).max(1).values
        optimizer.zero_grad()
        F.mse_loss(model(s).gather(1, a[:, None]).squeeze(1), wanted).backward()
        optimizer.step()
results = model.state_dict()

# %% soft_target: the target follows the model a little in every step
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)), torch.randn(48), torch.randn(48, 6))
loader = DataLoader(data, batch_size=12, shuffle=True)
model = perceptron()
target = copy.deepcopy(model)
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for s, a, r, s2 in loader:
        with torch.no_grad():
            wanted = r + 0.9 * target(s2).max(1).values
        optimizer.zero_grad()
        F.mse_loss(model(s).gather(1, a[:, None]).squeeze(1), wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for t, p in zip(target.parameters(), model.parameters()):
                t.mul_(0.9).add_(p, alpha=0.1)
results = {**model.state_dict(), **{f"target.{k}": v for k, v in target.state_dict().items()}}

# %% mean_teacher: consistency with a moving average of the model
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        out = model(x)
        optimizer.zero_grad()
        (F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), teacher(x).softmax(1))).backward()
        optimizer.step()
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), model.parameters()):
                t.lerp_(p, 0.2)
results = model.state_dict()

# %% centre_loss: centres of the classes, moved by hand after every step
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(4)
head = nn.Linear(4, 3)
both = nn.ModuleList([model, head])
optimizer = optim.SGD(both.parameters(), lr=0.1)
centres = torch.zeros(3, 4)
both, optimizer, loader = run.prepare(both, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        features = model(x)
        loss = F.cross_entropy(head(features), y) + 0.1 * (features - centres[y]).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for c in range(3):
                if (y == c).any():
                    centres[c] += 0.5 * (features[y == c].mean(0) - centres[c])
results = {**both.state_dict(), "centres": centres}

# %% running_scale: inputs are divided by a running deviation that the program keeps
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
scale = torch.ones(6)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        scale = 0.9 * scale + 0.1 * x.std(0)
        optimizer.zero_grad()
        F.cross_entropy(model(x / scale), y).backward()
        optimizer.step()
results = {**model.state_dict(), "scale": scale}

# %% reward_baseline: REINFORCE with a running mean of the rewards
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 3)), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.01)
baseline = 0.0
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, rewards in loader:
        choice = torch.distributions.Categorical(logits=model(x))
        action = choice.sample()
        reward = rewards.gather(1, action[:, None]).squeeze(1)
        optimizer.zero_grad()
        (-choice.log_prob(action) * (reward - baseline)).mean().backward()
        optimizer.step()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
results = model.state_dict()

# %% queue_of_keys: a contrast with keys of batches before (MoCo)
loader = DataLoader(rows(48), batch_size=12, shuffle=True)
model = perceptron(4)
key_model = copy.deepcopy(model).requires_grad_(False)
optimizer = optim.SGD(model.parameters(), lr=0.1)
queue = F.normalize(torch.randn(24, 4), dim=1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        q = F.normalize(model(x), dim=1)
        k = F.normalize(key_model(x), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        queue = torch.cat([k, queue])[:24]
        with torch.no_grad():
            for t, p in zip(key_model.parameters(), model.parameters()):
                t.lerp_(p, 0.1)
results = model.state_dict()

# %% centred_teacher: DINO's centre, a running mean of the teacher's outputs
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(5)
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = optim.AdamW(model.parameters(), lr=0.01)
centre = torch.zeros(1, 5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        with torch.no_grad():
            t = teacher(x)
            wanted = ((t - centre) / 0.04).softmax(1)
            centre = 0.9 * centre + 0.1 * t.mean(0, keepdim=True)
        optimizer.zero_grad()
        (-(wanted * (model(x) / 0.1).log_softmax(1)).sum(1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(teacher.parameters(), model.parameters()):
                a.lerp_(p, 0.05)
results = model.state_dict()

# %% contrast_of_a_batch: SimCLR, every sample against all others
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x * 1.1), dim=1)
        a, b = evener.gather(a), evener.gather(b)  # added
        optimizer.zero_grad()
        F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a))).backward()
        optimizer.step()
results = model.state_dict()

# %% contrast_without_gather: the same as it was written for one process
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x * 1.1), dim=1)
        optimizer.zero_grad()
        F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a))).backward()
        optimizer.step()
results = model.state_dict()

# %% correlation_of_a_batch: Barlow twins, a correlation over the batch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(4)
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        a, b = model(x), model(x * 1.1 + 0.05)
        a, b = evener.gather(a), evener.gather(b)  # added
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        c = a.T @ b / len(a)
        optimizer.zero_grad()
        ((torch.diagonal(c) - 1).square().sum() + 0.005 * (c - torch.diag(torch.diagonal(c))).square().sum()).backward()
        optimizer.step()
results = model.state_dict()

# %% sums_over_rows: a loss that is a sum over the batch, said so
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader, count="sum")  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
results = model.state_dict()

# %% sums_unsaid: the same without a word
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
results = model.state_dict()

# %% two_backwards_for_some: a second backward pass in every other step
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if i % 2:
            (0.1 * model(x).square().mean()).backward()
        optimizer.step()
results = model.state_dict()

# %% statistics_of_features: a penalty on the variance over the batch (VICReg)
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron(4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        z = model(x)
        optimizer.zero_grad()
        (z.square().mean() + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()).backward()
        optimizer.step()
results = model.state_dict()

# %% resume_from_file: the state is saved amid training, loaded again, and goes on
import io

loader = DataLoader(rows(), batch_size=10)
model = perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
file = io.BytesIO()
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if epoch == 1:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
results = model.state_dict()

# %% counted_in_epochs: right answers are counted over an epoch, with batches of the loader and with kept ones
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
total = run.sum  # was: total = float
counts = []
kept = list(loader)
for epoch in run.epochs(4):  # was: for epoch in range(4):
    right = number = 0
    for x, y in loader if epoch < 2 else kept:
        out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward()
        optimizer.step()
        right += int((out.argmax(1) == y).sum())
        number += len(y)
    counts += [float(total(right)), float(total(number))]
results = {**model.state_dict(), "counts": torch.tensor(counts)}

# %% counted_in_steps: the same step by step, with a last batch of three samples
loader = DataLoader(rows(43), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
total = run.sum  # was: total = float
number = 0.0
kept = list(loader)
for epoch in run.epochs(4):  # was: for epoch in range(4):
    for x, y in loader if epoch < 2 else kept:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        number += float(total(len(y)))
results = {**model.state_dict(), "number": torch.tensor(number)}

# %% counted_over_short_batches: an epoch whose last batch has one sample, counted at its end
loader = DataLoader(rows(41), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
total = run.sum  # was: total = float
number = 0
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        number += len(y)
    number = total(number)
results = {**model.state_dict(), "number": torch.tensor(number)}

# %% counted_after_eval: what was counted in training is summed in evaluation mode
loader = DataLoader(rows(41), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
total = run.sum  # was: total = float
counts = []
for epoch in run.epochs(2):  # was: for epoch in range(2):
    model.train()
    number = 0
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        number += len(y)
    model.eval()
    counts.append(total(number))
results = {**model.state_dict(), "counts": torch.tensor(counts)}
