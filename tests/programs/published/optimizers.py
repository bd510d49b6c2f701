"""Programs with optimisers, types of numbers and updates of their own."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added


def rows(count=40, features=6, classes=3):
    return TensorDataset(torch.randn(count, features), torch.randint(0, classes, (count,)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


# %% complex_weights: a layer of complex numbers
class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 8, dtype=torch.complex128) / 4)
        self.b = nn.Parameter(torch.randn(8, 3, dtype=torch.complex128) / 4)

    def forward(self, x):
        return torch.tanh(x.to(self.a.dtype) @ self.a).matmul(self.b).abs()


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = Complex()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = {k: torch.view_as_real(v) for k, v in model.state_dict().items()}

# %% fourier_operator: weights of single complex precision beside real ones, on frequencies
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Linear(1, 4), nn.Linear(4, 1)
        self.weight = nn.Parameter(0.2 * torch.randn(4, 4, 3, dtype=torch.cdouble))

    def forward(self, x):
        h = self.lift(x[..., None]).transpose(1, 2)
        f = torch.fft.rfft(h)[:, :, :3]
        g = torch.fft.irfft(torch.einsum("bik,iok->bok", f, self.weight), n=x.shape[1])
        return self.out(F.gelu(g + h).transpose(1, 2)).squeeze(2)


loader = DataLoader(TensorDataset(torch.randn(36, 8), torch.randn(36, 8)), batch_size=9, shuffle=True)
model = Spectral()
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
results = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in model.state_dict().items()}

# %% gradient_noise: noise on every gradient
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn_like(p.grad))
        optimizer.step()
results = model.state_dict()

# %% langevin: an optimiser that draws (SGLD)
class Langevin(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    p.add_(torch.randn_like(p), alpha=math.sqrt(2e-4 * group["lr"]))


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = Langevin(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% lion: a hand-written optimiser of signs
class Lion(optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                update = torch.tanh(20 * (m * b1 + p.grad * (1 - b1)))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = Lion(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% lookahead: slow weights follow the fast ones every few steps
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
slow = [p.detach().clone() for p in model.parameters()]
step = 0
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters()):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
results = model.state_dict()

# %% by_hand: no optimiser at all
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
model, loader = run.prepare(model, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
results = model.state_dict()

# %% schedulers: warm-up, then a cosine, step by step
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
cosine = lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader) - 3)
schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
results = model.state_dict()

# %% one_cycle: a cycle over all steps, its length from the loader
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, steps_per_epoch=len(loader), epochs=2)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
results = model.state_dict()

# %% plateau_of_means: a rate that falls when the loss of an epoch does not
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
for epoch in run.epochs(4):  # was: for epoch in range(4):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += float(run.mean(loss))  # was: total += loss.item()
    schedule.step(total)
results = model.state_dict()

# %% plateau_of_own_loss: the same by the loss that a process sees
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
for epoch in run.epochs(4):  # was: for epoch in range(4):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    schedule.step(total)
results = model.state_dict()

# %% rate_by_batch_size: the linear scaling rule, by the length of what was loaded
loader = DataLoader(rows(43), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * len(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% clip_and_log_norms: gradients are clipped by value and by norm
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
norms = []
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
results = {**model.state_dict(), "norms": torch.stack(norms)}

# %% gradient_centralisation: the mean is taken off every gradient, by a hook
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    if p.dim() > 1:
        p.register_hook(lambda g: g - g.mean(1, keepdim=True))
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
results = model.state_dict()

# %% moving_average: an average of the weights, evaluated at the end
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = perceptron()
optimizer = optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
average = copy.deepcopy(model).requires_grad_(False)
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.1)
results = average.state_dict()

# %% sparse_embedding: an embedding with rows of gradients, and its own optimiser
loader = DataLoader(TensorDataset(torch.randint(0, 30, (40, 3)), torch.randint(0, 3, (40,))), batch_size=8)
embedding = nn.EmbeddingBag(30, 8, mode="sum", sparse=True)
head = nn.Linear(8, 3)
model = nn.Sequential(embedding, head)
rows_of = optim.SparseAdam(embedding.parameters(), lr=0.02)
rest = optim.Adam(head.parameters(), lr=0.02)
model, rows_of, rest, loader = run.prepare(model, rows_of, rest, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        rows_of.zero_grad()
        rest.zero_grad()
        F.cross_entropy(model(x), y).backward()
        rows_of.step()
        rest.step()
results = model.state_dict()

# %% lbfgs: full batches and a closure
loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=24)
model = nn.Linear(4, 1)
optimizer = optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(3):  # was: for epoch in range(3):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
results = model.state_dict()

# %% second_order_penalty: the norm of the gradient is part of the loss
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, _ in loader:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
results = model.state_dict()

# %% hessian_diagonal: an optimiser that differentiates the gradients of the weights (AdaHessian)
class AdaHessian(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
        self.generator = torch.Generator().manual_seed(3)

    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        signs = [torch.randint(0, 2, p.shape, generator=self.generator) * 2.0 - 1.0 for p in params]
        products = torch.autograd.grad([p.grad for p in params], params, grad_outputs=signs)
        with torch.no_grad():
            for p, sign, product in zip(params, signs, products):
                state = self.state[p]
                state["h"] = 0.9 * state.get("h", torch.zeros_like(p)) + 0.1 * (product * sign).square()
                p.sub_(self.param_groups[0]["lr"] * p.grad / (state["h"].sqrt() + 0.1))


loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
optimizer = AdaHessian(model.parameters())
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(create_graph=True)
        optimizer.step()
results = model.state_dict()

# %% gradient_kept_in_graph: gradients that could be differentiated, and are not
loader = DataLoader(rows(), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward(create_graph=True)
        optimizer.step()
results = model.state_dict()
