"""A small GPT on characters, in the manner of nanoGPT: batches are drawn by hand, weights are tied."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.c_attn, self.c_proj = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(10, 8)
        self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    ix = torch.randint(len(data) - 10, (6,))
    return torch.stack([data[i : i + 10] for i in ix]), torch.stack([data[i + 1 : i + 11] for i in ix])


run = evener.join()  # added
data = torch.randint(0, 20, (500,))
model = GPT()
optimizer = optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = run.prepare(model, optimizer)  # added
for iteration in run.epochs(6):  # was: for iteration in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (iteration + 1) / 3)
    X, Y = run.share(get_batch())  # was: X, Y = get_batch()
    logits, loss = model(X, Y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
results = model.state_dict()
