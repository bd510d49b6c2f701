"""Programs that keep batches, and use them later, again or beside others."""

import itertools
import queue
import threading
from collections import deque

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


# %% prefetcher: the class that fetches one batch ahead, from NVIDIA's examples
class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None

    def next(self):
        x, y = self.next_input, self.next_target
        if x is not None:
            self.preload()
        return x, y


loader = DataLoader(rows(43), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    fetcher = Prefetcher(loader)
    x, y = fetcher.next()
    while x is not None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        x, y = fetcher.next()
results = model.state_dict()

# %% background_queue: a thread that loads batches into a queue
def batches_of(loader):
    waiting = queue.Queue(maxsize=3)

    def fill():
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := waiting.get()) is not None:
        yield batch


loader = DataLoader(rows(43), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in batches_of(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% overfit_one_batch: the first sanity check of every project
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
x, y = next(iter(loader))
for step in range(8):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
results = model.state_dict()

# %% list_of_batches: all batches are loaded once, and kept
loader = DataLoader(rows(43), batch_size=10)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
batches = list(loader)
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% one_batch_behind: trains on the batch before, which it compares with this one
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    before = None
    for batch in loader:
        if before is not None:
            x, y = before
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        before = batch
results = model.state_dict()

# %% every_batch_twice: two updates from each batch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
results = model.state_dict()

# %% cycle: an endless loader, a fixed number of iterations
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added


def cycle(loader):
    while True:
        yield from loader


endless = cycle(loader)
for step in range(11):
    x, y = next(endless)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
results = model.state_dict()

# %% itertools_cycle: batches of the first epoch again and again
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for x, y in itertools.islice(itertools.cycle(loader), 9):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
results = model.state_dict()

# %% first_batches_only: a limit on the batches of an epoch
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        if i == 3:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% accumulated_by_hand: one update every three batches, the rest at the end
loader = DataLoader(rows(), batch_size=5, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 3).backward()
        if (i + 1) % 3 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
results = model.state_dict()

# %% chunks_of_a_batch: a batch goes through the model in pieces
loader = DataLoader(rows(48), batch_size=12, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        outputs = torch.cat([model(part) for part in x.split(4)])
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
results = model.state_dict()

# %% replay_buffer: every update also sees a batch of some steps before
loader = DataLoader(rows(), batch_size=8, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
memory = deque(maxlen=3)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if memory:
            old_x, old_y = memory[0]
            loss = loss + 0.5 * F.cross_entropy(model(old_x), old_y)
        loss.backward()
        optimizer.step()
        memory.append((x, y))
results = model.state_dict()

# %% two_loaders: a large set beside a small one that begins again
large = DataLoader(rows(40), batch_size=8, shuffle=True)
small = DataLoader(rows(16), batch_size=8, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, large, small = run.prepare(model, optimizer, large, small)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    others = iter(small)
    for x, y in large:
        try:
            x2, y2 = next(others)
        except StopIteration:
            others = iter(small)
            x2, y2 = next(others)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x2), y2)).backward()
        optimizer.step()
results = model.state_dict()

# %% joined_batches: two loaders whose batches become one
first = DataLoader(rows(40), batch_size=8, shuffle=True)
second = DataLoader(rows(40), batch_size=8, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, first, second = run.prepare(model, optimizer, first, second)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (x, y), (x2, y2) in zip(first, second):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([x, x2])), torch.cat([y, y2])).backward()
        optimizer.step()
results = model.state_dict()

# %% dictionary_batches: samples are dictionaries, and one key is text
class Named:
    def __init__(self, count=40):
        self.x, self.y = torch.randn(count, 6), torch.randint(0, 3, (count,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "label": self.y[i], "name": f"sample {i}"}


loader = DataLoader(Named(), batch_size=8, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["label"]).backward()
        optimizer.step()
results = model.state_dict()
