"""Networks as they are published, in small, with their own losses."""

import math

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def images(count=36, channels=3, side=8, classes=3):
    return TensorDataset(torch.randn(count, channels, side, side), torch.randint(0, classes, (count,)))


def train(model, optimizer, loader, loss, epochs=2):
    for epoch in run.epochs(epochs):  # was: for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


# %% efficientnet_block: expand, depthwise, squeeze and excite, project; new norms on few pixels
class MBConv(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        wide = 4 * inside
        self.expand = nn.Sequential(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 2, 1), nn.SiLU(), nn.Conv2d(2, wide, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        h = self.depth(self.expand(x))
        return self.project(h * self.squeeze(h))


loader = DataLoader(images(side=8), batch_size=9, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.SiLU(), MBConv(4, 6, 2), MBConv(6, 8, 2),
    nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(12, 3),
)
optimizer = optim.RMSprop(model.parameters(), lr=0.001, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, F.cross_entropy)
results = model.state_dict()

# %% shuffle_block: channels are split, convolved in groups, joined and shuffled
class Shuffle(nn.Module):
    def __init__(self, width):
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
        )

    def forward(self, x):
        a, b = x.chunk(2, 1)
        x = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


loader = DataLoader(images(side=6), batch_size=9, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Shuffle(8), Shuffle(8),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
)
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=4e-5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, F.cross_entropy)
results = model.state_dict()

# %% low_rank_adapters: LoRA on a small transformer, whose own weights are frozen
class Lora(nn.Module):
    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + 4 * x @ self.a.T @ self.b.T


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(20, 8), nn.Embedding(7, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.word.weight

    def forward(self, x):
        h = self.word(x) + self.place(torch.arange(x.shape[1]))
        q, k, v = self.qkv(h).view(*x.shape, 2, 12).transpose(1, 2).chunk(3, 3)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(h + self.out(a.transpose(1, 2).reshape(*x.shape, 8))))


tokens = torch.randint(0, 20, (40, 8))
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8, shuffle=True)
model = Lm().requires_grad_(False)
model.qkv, model.out = Lora(model.qkv), Lora(model.out)
optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
results = model.state_dict()

# %% loss_in_single_precision: a language model that converts its logits before the loss, as transformers does
class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.word.weight

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.inner(self.word(x)))).float()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


tokens = torch.randint(0, 20, (40, 8))
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8, shuffle=True)
model = Lm()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
results = model.state_dict()

# %% maml: a gradient step inside of the loss, by functional_call
loader = DataLoader(TensorDataset(torch.randn(24, 8, 2), torch.randn(24, 8, 1)), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        losses = []
        for task_x, task_y in zip(x, y):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, weights, (task_x[:4],)), task_y[:4])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {k: w - 0.05 * g for (k, w), g in zip(weights.items(), slopes)}
            losses.append(F.mse_loss(functional_call(model, fast, (task_x[4:],)), task_y[4:]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
results = model.state_dict()

# %% residual_network: CIFAR's network in small, with a head of its own rate
class Basic(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.one, self.n1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.two, self.n2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.n2(self.two(F.relu(self.n1(self.one(x))))) + self.short(x))


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Basic(4, 6, 2), Basic(6, 8, 2), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))


loader = DataLoader(images(), batch_size=9, shuffle=True)
model = Resnet()
optimizer = optim.SGD([{"params": model.body.parameters(), "lr": 0.02}, {"params": model.fc.parameters()}], lr=0.2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, nn.CrossEntropyLoss(label_smoothing=0.1))
results = model.state_dict()

# %% vision_transformer: patches, a class token, attention
class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.blocks(x)[:, 0])


loader = DataLoader(images(), batch_size=9, shuffle=True)
model = Vit()
optimizer = optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, F.cross_entropy)
results = model.state_dict()

# %% segmentation_by_dice: a U-Net whose loss is one overlap over all pixels of a batch
class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 1, 1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.relu(self.up(F.relu(self.inner(F.max_pool2d(a, 2)))))
        return self.out(torch.cat([a, b], 1)).squeeze(1)


masks = (torch.rand(36, 8, 8) < 0.4).double()
loader = DataLoader(TensorDataset(torch.randn(36, 3, 8, 8), masks), batch_size=9, shuffle=True)
model = Unet()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added


def dice(out, y):
    p = out.sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


train(model, optimizer, loader, dice)
results = model.state_dict()

# %% segmentation_by_pixels: the same network, a mean over pixels with a class that is left out
class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 4, 1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.relu(self.up(F.relu(self.inner(F.max_pool2d(a, 2)))))
        return self.out(torch.cat([a, b], 1))


labels = torch.randint(0, 4, (36, 8, 8))
labels[torch.rand(labels.shape) < 0.2] = 255
loader = DataLoader(TensorDataset(torch.randn(36, 3, 8, 8), labels), batch_size=9, shuffle=True)
model = Unet()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: (batch[1] != 255).sum())  # added
train(model, optimizer, loader, nn.CrossEntropyLoss(ignore_index=255))
results = model.state_dict()

# %% recurrent_language_model: truncated back-propagation, a hidden state that goes on
class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.lstm, self.out = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, x, state):
        h, state = self.lstm(self.word(x), state)
        return self.out(h), state


text = torch.randint(0, 12, (40, 13))
loader = DataLoader(TensorDataset(text), batch_size=8, shuffle=True)
model = Rnn()
optimizer = optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (words,) in loader:
        state = None
        for start in (0, 6):
            out, state = model(words[:, start : start + 6], state)
            state = tuple(s.detach() for s in state)
            optimizer.zero_grad()
            F.cross_entropy(out.flatten(0, 1), words[:, start + 1 : start + 7].flatten()).backward()
            optimizer.step()
results = model.state_dict()

# %% translation: a transformer with padding, a mean over the words that are there
class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(14, 8, padding_idx=0)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 14)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.out(self.inner(self.word(source), self.word(target), tgt_mask=mask, tgt_is_causal=True))


source, target = torch.randint(1, 14, (40, 5)), torch.randint(1, 14, (40, 6))
target[torch.arange(6)[None] >= torch.randint(3, 7, (40, 1))] = 0
loader = DataLoader(TensorDataset(source, target), batch_size=8, shuffle=True)
model = Seq2Seq()
optimizer = optim.Adam(model.parameters(), lr=0.005, betas=(0.9, 0.98), eps=1e-9)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: (batch[1][:, 1:] > 0).sum())  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for s, t in loader:
        optimizer.zero_grad()
        out = model(s, t[:, :-1])
        F.cross_entropy(out.flatten(0, 1), t[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
results = model.state_dict()

# %% speech: CTC over frames, a mean over the samples
frames, words = torch.randn(36, 12, 5), torch.randint(1, 8, (36, 4))
loader = DataLoader(TensorDataset(frames, words, torch.randint(2, 5, (36,))), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y, n in loader:
        optimizer.zero_grad()
        logs = model(x).log_softmax(2).transpose(0, 1)
        F.ctc_loss(logs, y, torch.full((len(x),), 12), n, zero_infinity=True).backward()
        optimizer.step()
results = model.state_dict()

# %% matrix_factorisation: users and items, biases, a regulariser on what a batch uses
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(20, 4), nn.Embedding(15, 4)
        self.user_bias, self.item_bias = nn.Embedding(20, 1), nn.Embedding(15, 1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


data = TensorDataset(torch.randint(0, 20, (60,)), torch.randint(0, 15, (60,)), torch.rand(60) * 5)
loader = DataLoader(data, batch_size=12, shuffle=True)
model = Factors()
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for u, i, r in loader:
        optimizer.zero_grad()
        penalty = model.user(u).square().sum(1).mean() + model.item(i).square().sum(1).mean()
        (F.mse_loss(model(u, i), r) + 0.01 * penalty).backward()
        optimizer.step()
results = model.state_dict()

# %% points: a network of points with a transform and a penalty on it (PointNet)
class Points(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix, self.body = nn.Linear(8, 9), nn.Sequential(nn.Conv1d(3, 10, 1), nn.BatchNorm1d(10), nn.ReLU())
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        t = self.matrix(self.turn(x).max(2).values).view(-1, 3, 3) + torch.eye(3)
        return self.head(self.body(torch.bmm(t, x)).max(2).values), t


loader = DataLoader(TensorDataset(torch.randn(36, 3, 12), torch.randint(0, 3, (36,))), batch_size=9, shuffle=True)
model = Points()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        out, t = model(x)
        penalty = (torch.bmm(t, t.transpose(1, 2)) - torch.eye(3)).norm(dim=(1, 2)).mean()
        (F.cross_entropy(out, y) + 0.001 * penalty).backward()
        optimizer.step()
results = model.state_dict()

# %% normalising_flow: RealNVP, whose loss is a mean of logarithms
class Coupling(nn.Module):
    def __init__(self, turned):
        super().__init__()
        self.turned, self.net = turned, nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        a, b = (b, a) if self.turned else (a, b)
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.turned else [a, b], 1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2) for i in range(4))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, volume = layer(x)
            total = total + volume
        return x, total


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Flow()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        optimizer.zero_grad()
        z, volume = model(x)
        (0.5 * z.square().sum(1) - volume).mean().backward()
        optimizer.step()
results = model.state_dict()

# %% physics_informed: a differential equation as a loss, by gradients of the outputs
loader = DataLoader(TensorDataset(torch.rand(40, 1) * 6), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for (t,) in loader:
        t = t.clone().requires_grad_()
        u = model(t)
        (first,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first, t, torch.ones_like(u), create_graph=True)
        optimizer.zero_grad()
        (second + u).square().mean().backward()
        optimizer.step()
results = model.state_dict()

# %% vector_quantised: a code book that is learned by gradients, and straight through
class Vq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.book, self.decode = nn.Linear(6, 4), nn.Embedding(8, 4), nn.Linear(4, 6)

    def forward(self, x):
        z = self.encode(x)
        q = self.book(torch.cdist(z, self.book.weight).argmin(1))
        return self.decode(z + (q - z).detach()), F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Vq()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        optimizer.zero_grad()
        out, penalty = model(x)
        (F.mse_loss(out, x) + penalty).backward()
        optimizer.step()
results = model.state_dict()

# %% distillation: a teacher that does not learn, softened outputs
loader = DataLoader(rows(), batch_size=10, shuffle=True)
teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).eval().requires_grad_(False)
model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        soft = F.kl_div((out / 4).log_softmax(1), (teacher(x) / 4).softmax(1), reduction="batchmean") * 16
        (0.3 * F.cross_entropy(out, y) + 0.7 * soft).backward()
        optimizer.step()
results = model.state_dict()

# %% spectral_norm_critic: a norm of weights that is followed by power iteration
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(spectral_norm(nn.Linear(6, 9)), nn.ReLU(), weight_norm(nn.Linear(9, 3)))
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, F.cross_entropy)
results = model.state_dict()

# %% mixture_of_experts: a gate, the best expert alone, a penalty for balance over the batch
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x):
        p = self.gate(x).softmax(1)
        best = p.argmax(1)
        out = torch.stack([e(x) for e in self.experts], 1)
        return out[torch.arange(len(x)), best] * p.gather(1, best[:, None])


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Experts()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
train(model, optimizer, loader, F.cross_entropy)
results = model.state_dict()
