"""Programs whose random numbers have the shape of a batch, or decide for all of it."""

import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def images(count=36, channels=3, side=8, classes=3):
    return TensorDataset(torch.randn(count, channels, side, side), torch.randint(0, classes, (count,)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


# %% masked_words: BERT's masks, a mean over the masked words of a batch
tokens = torch.randint(3, 20, (40, 7))
loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 20))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (words,) in loader:
        masked = torch.rand(words.shape) < 0.3
        inputs = torch.where(masked, torch.ones_like(words), words)
        labels = torch.where(masked, words, torch.full_like(words, -100))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
        optimizer.step()
results = model.state_dict()

# %% masked_words_per_row: a mean over the masked words of each row, then over the rows
tokens = torch.randint(3, 20, (40, 7))
loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 20))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (words,) in loader:
        masked = torch.rand(words.shape) < 0.3
        inputs = torch.where(masked, torch.ones_like(words), words)
        losses = F.cross_entropy(model(inputs).transpose(1, 2), words, reduction="none") * masked
        optimizer.zero_grad()
        (losses.sum(1) / masked.sum(1).clamp(min=1)).mean().backward()
        optimizer.step()
results = model.state_dict()

# %% masked_autoencoder: hides a fixed part of the patches of each sample
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x):
        order = torch.rand(x.shape[0], x.shape[1]).argsort(1)
        hidden = order < 3
        seen = torch.where(hidden[..., None], self.mask, x)
        rebuilt = self.decode(F.gelu(self.encode(seen)) + F.gelu(self.encode(seen)).mean(1, keepdim=True))
        return ((rebuilt - x).square().mean(2) * hidden).sum() / hidden.sum()


loader = DataLoader(TensorDataset(torch.randn(40, 6, 4)), batch_size=8, shuffle=True)
model = Masked()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
results = model.state_dict()

# %% mixup: a batch is mixed with a permutation of itself
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        part, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        mixed = part * x + (1 - part) * x[order]
        optimizer.zero_grad()
        outputs = model(mixed)
        (part * F.cross_entropy(outputs, y) + (1 - part) * F.cross_entropy(outputs, y[order])).backward()
        optimizer.step()
results = model.state_dict()

# %% cutmix_by_coin: half of the batches get a patch of another image
loader = DataLoader(images(), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        if np.random.rand() < 0.5:
            order, side = torch.randperm(x.size(0)), 4
            top, left = np.random.randint(4), np.random.randint(4)
            x = x.clone()
            x[:, :, top : top + side, left : left + side] = x[order, :, top : top + side, left : left + side]
            outputs, part = model(x), 1 - side * side / 64
            loss = part * F.cross_entropy(outputs, y) + (1 - part) * F.cross_entropy(outputs, y[order])
        else:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
results = model.state_dict()

# %% noisy_inputs: noise on the inputs of every batch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
        optimizer.step()
results = model.state_dict()

# %% dropout: the oldest random layer
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% stochastic_depth: a block is left out for some samples (timm's DropPath)
class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.inner = rate, nn.Linear(9, 9)

    def forward(self, x):
        if not self.training:
            return x + F.relu(self.inner(x))
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(1 - self.rate).div_(1 - self.rate)
        return x + kept * F.relu(self.inner(x))


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), DropPath(0.3), DropPath(0.3), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% variational_autoencoder: mean over the samples of the sum over the features
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decode(z), mean, logvar


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Vae()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        rebuilt, mean, logvar = model(x)
        error = (rebuilt - x).square().sum(1).mean()
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        optimizer.zero_grad()
        (error + divergence).backward()
        optimizer.step()
results = model.state_dict()

# %% diffusion: a random time and noise for each sample
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        t = torch.randint(0, 50, (x.shape[0],))
        noise = torch.randn_like(x)
        a = alphas[t][:, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        optimizer.zero_grad()
        F.mse_loss(model(torch.cat([noisy, t[:, None] / 50], 1)), noise).backward()
        optimizer.step()
results = model.state_dict()

# %% negative_sampling: word2vec with random words beside the true ones
centres, contexts = torch.randint(0, 30, (48,)), torch.randint(0, 30, (48,))
loader = DataLoader(TensorDataset(centres, contexts), batch_size=12, shuffle=True)


class Skipgram(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.context = nn.Embedding(30, 8), nn.Embedding(30, 8)

    def forward(self, centre, context, negative):
        v = self.word(centre)
        near = F.logsigmoid((v * self.context(context)).sum(1))
        far = F.logsigmoid(-(self.context(negative) @ v[:, :, None]).squeeze(2)).sum(1)
        return -(near + far).mean()


model = Skipgram()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for centre, context in loader:
        optimizer.zero_grad()
        model(centre, context, torch.randint(0, 30, (len(centre), 5))).backward()
        optimizer.step()
results = model.state_dict()

# %% gumbel_softmax: a random choice that gradients pass
class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.values, self.out = nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(F.relu(self.values(F.gumbel_softmax(self.score(x), tau=0.7, hard=True))))


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Chooser()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% multi_scale: every batch has a size of its own, drawn by Python
loader = DataLoader(images(), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        side = random.choice([6, 8, 10])
        x = F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% random_flips: some images of a batch are turned over
loader = DataLoader(images(), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        flipped = torch.rand(len(x)) < 0.5
        x = torch.where(flipped[:, None, None, None], x.flip(3), x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% cutout: one hole for all images of a batch
loader = DataLoader(images(), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        top, left = torch.randint(0, 5, (2,)).tolist()
        x = x.clone()
        x[:, :, top : top + 3, left : left + 3] = 0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% teacher_forcing_by_coin: a coin for every step of a decoder
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 10), nn.Linear(10, 12)

    def forward(self, targets):
        hidden, inputs, outputs = torch.zeros(targets.shape[0], 10), targets[:, 0], []
        for t in range(1, targets.shape[1]):
            hidden = self.cell(self.word(inputs), hidden)
            outputs.append(self.out(hidden))
            inputs = targets[:, t] if random.random() < 0.5 else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


loader = DataLoader(TensorDataset(torch.randint(0, 12, (40, 6))), batch_size=8, shuffle=True)
model = Decoder()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (words,) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(words).flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
results = model.state_dict()

# %% label_noise: some labels of a batch are drawn anew
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        y = torch.where(torch.rand(y.shape) < 0.2, torch.randint(0, 3, y.shape), y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% fixed_generator: noise from a generator of the program's own
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
generator = torch.Generator().manual_seed(7)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        scale = 1 + 0.1 * torch.randn((), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x * scale), y).backward()
        optimizer.step()
results = model.state_dict()

# %% adversarial_examples: noise, then a step along the gradient of the inputs (PGD)
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        change = torch.empty_like(x).uniform_(-0.1, 0.1).requires_grad_()
        loss = F.cross_entropy(model(x + change), y)
        (slope,) = torch.autograd.grad(loss, [change])
        change = (change + 0.05 * slope.sign()).clamp(-0.1, 0.1).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(x + change), y).backward()
        optimizer.step()
results = model.state_dict()

# %% monte_carlo_dropout: the mean of two passes of one batch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        a, b = model(x), model(x)
        both = F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        (F.cross_entropy(a, y) + F.cross_entropy(b, y) + 0.5 * both).backward()
        optimizer.step()
results = model.state_dict()
