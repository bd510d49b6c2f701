"""A GPT on characters in the manner of nanoGPT: batches drawn by hand, tied weights, AdamW with a warm-up and clipping.

    evener run examples/11_char_gpt.py --local-nodes 1.0,0.5 --steps 200 --text shakespeare.txt

Every node draws the same batch, as `run.epochs` lets them begin each step alike; `run.share` gives it its part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener  # 1

LENGTH, WIDTH, HEADS = 32, 32, 4


class Block(nn.Module):
    """Attention to what came before, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        query, key, value = (
            part.view(n, t, HEADS, c // HEADS).transpose(1, 2) for part in self.attend(self.before(x)).split(c, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, t, c))
        out: Tensor = x + self.layers(self.after(x))
        return out


class GPT(nn.Module):
    """Logits of the next character; the embedding is the last layer's weight, too."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.word.weight
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, index: Tensor) -> Tensor:
        x = self.word(index) + self.place(torch.arange(index.shape[1], device=index.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def main() -> None:
    """Train, and show the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=30)
    words = parser.parse_args()
    run = evener.join()  # 2
    torch.manual_seed(0)
    text = words.text.read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(one) for one in text])
    model = GPT(len(characters)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer = run.prepare(model, optimizer)  # 3
    for step in run.epochs(words.steps):  # 4
        begins = torch.randint(len(data) - LENGTH, (12,)).tolist()
        batch = torch.stack([data[i : i + LENGTH + 1] for i in begins]).to(run.device)
        batch = run.share(batch)  # 5
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        shown = float(run.mean(loss))  # 6
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {shown:.4f}")
    if run.leader:
        torch.save(run.state(model), "gpt.pt")


if __name__ == "__main__":
    main()
