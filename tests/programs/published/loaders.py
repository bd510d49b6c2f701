"""Programs with loaders, workers and samplers of their own."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset,
    SubsetRandomSampler, TensorDataset, WeightedRandomSampler, random_split,
)

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


# %% one_worker: a loader with a worker process, in a script without a guard
loader = DataLoader(rows(), batch_size=10, shuffle=True, num_workers=1)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% lambda_transform: workers that get a lambda and a class of this script
class Transformed(Dataset):
    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return self.change(x), y


loader = DataLoader(Transformed(rows(), lambda x: x * 2 - 1), batch_size=10, num_workers=2, persistent_workers=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% weighted_sampler: rare classes are drawn more often
data = rows()
weights = 1.0 / torch.bincount(data.tensors[1], minlength=3).clamp(min=1)
loader = DataLoader(data, batch_size=10, sampler=WeightedRandomSampler(weights[data.tensors[1]], 40))
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% train_and_validation_split: two samplers over one set, the best weights are kept
data, order = rows(50), torch.randperm(50).tolist()
loader = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[10:]))
held_out = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[:10]))
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader, held_out = run.prepare(model, optimizer, loader, held_out)  # added
best, kept = float("inf"), None
for epoch in run.epochs(3):  # was: for epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        total = sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in held_out)
        total = float(run.sum(total))  # was: total = float(total)
    if total < best:
        best, kept = total, {k: v.clone() for k, v in model.state_dict().items()}
results = {**kept, "best": torch.tensor(best)}

# %% buckets_by_length: sequences of one length together, batches of different size
class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.groups = [[i for i, n in enumerate(lengths) if n == length] for length in sorted(set(lengths))]
        self.size = size

    def __iter__(self):
        batches = [g[i : i + self.size] for g in self.groups for i in range(0, len(g), self.size)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return sum(-(-len(g) // self.size) for g in self.groups)


class Sequences(Dataset):
    def __init__(self, count=40):
        self.lengths = [3 + i % 4 for i in range(count)]
        self.words = [torch.randint(0, 12, (n,)) for n in self.lengths]
        self.labels = torch.randint(0, 3, (count,))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.labels[i]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.word(words).mean(1))


data = Sequences()
loader = DataLoader(data, batch_sampler=Buckets(data.lengths, 6))
model = Bag()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for words, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(words), y).backward()
        optimizer.step()
results = model.state_dict()

# %% padded_sequences: a collate function pads, a mask leaves out what was padded
class Sequences(Dataset):
    def __init__(self, count=40):
        self.words = [torch.randint(1, 12, (3 + i % 5,)) for i in range(count)]
        self.labels = torch.randint(0, 3, (count,))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.labels[i]


def collate(samples):
    words, labels = zip(*samples)
    return pad_sequence(words, batch_first=True), torch.stack(labels)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words):
        there = (words > 0)[..., None]
        return self.out((self.word(words) * there).sum(1) / there.sum(1))


loader = DataLoader(Sequences(), batch_size=8, shuffle=True, collate_fn=collate)
model = Bag()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for words, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(words), y).backward()
        optimizer.step()
results = model.state_dict()

# %% mixing_collate: a collate function that mixes the samples of a batch
def mix(samples):
    x, y = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    return 0.7 * x + 0.3 * x.flip(0), y, y.flip(0)


loader = DataLoader(rows(), batch_size=10, shuffle=True, collate_fn=mix)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y, z in loader:
        outputs = model(x)
        optimizer.zero_grad()
        (0.7 * F.cross_entropy(outputs, y) + 0.3 * F.cross_entropy(outputs, z)).backward()
        optimizer.step()
results = model.state_dict()

# %% stream: an iterable data set
class Numbers(IterableDataset):
    def __iter__(self):
        for i in range(35):
            x = torch.sin(torch.arange(6) * (i + 1.0))
            yield x, torch.tensor(i % 3)


loader = DataLoader(Numbers(), batch_size=8)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% concatenated_sets: two sets behind each other, the last batch is dropped
loader = DataLoader(ConcatDataset([rows(25), rows(18)]), batch_size=8, shuffle=True, drop_last=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% last_batch_of_one: the last batch has one sample
loader = DataLoader(rows(41), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% drawing_dataset: a data set that draws a crop of each sample when it is asked
class Cropped(Dataset):
    def __init__(self, count=36):
        self.images, self.labels = torch.randn(count, 3, 10, 10), torch.randint(0, 3, (count,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        top, left = np.random.randint(3), random.randint(0, 2)
        image = self.images[i, :, top : top + 8, left : left + 8]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[i]


loader = DataLoader(Cropped(), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% few_shot_episodes: a sampler of classes, a loss between the samples of an episode
class Episodes(Sampler):
    def __init__(self, labels, count):
        self.where = [torch.nonzero(labels == c).flatten().tolist() for c in range(3)]
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield [i for group in self.where for i in random.sample(group, 4)]

    def __len__(self):
        return self.count


labels = torch.arange(45) % 3
loader = DataLoader(TensorDataset(torch.randn(45, 6), labels), batch_sampler=Episodes(labels, 5))
model = nn.Linear(6, 4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        embedded = model(x)
        centres = torch.stack([embedded[y == c].mean(0) for c in range(3)])
        optimizer.zero_grad()
        F.cross_entropy(-torch.cdist(embedded, centres), y).backward()
        optimizer.step()
results = model.state_dict()

# %% lines_of_text: a character model on pieces of one text, drawn by hand
text = torch.randint(0, 15, (400,))
model = nn.Sequential(nn.Embedding(15, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 15))
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)  # added
for step in range(12):
    starts = torch.randint(0, 380, (8,))
    x = torch.stack([text[s : s + 10] for s in starts])
    y = torch.stack([text[s + 1 : s + 11] for s in starts])
    x, y = run.share((x, y))  # added
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
results = model.state_dict()

# %% random_split_loaders: random_split, two loaders, accuracy at the end
train_set, test_set = random_split(rows(50), [40, 10])
loader = DataLoader(train_set, batch_size=8, shuffle=True)
test_loader = DataLoader(test_set, batch_size=4)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader, test_loader = run.prepare(model, optimizer, loader, test_loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
right = torch.zeros(())
model.eval()
with torch.no_grad():
    for x, y in test_loader:
        right += (model(x).argmax(1) == y).sum()
right = run.sum(right)  # added
results = {**model.state_dict(), "right": right}
