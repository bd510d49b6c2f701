"""A graph network on graphs of different sizes, with a collate function of its own; the loss is a mean over graphs.

    evener run examples/14_graphs.py --local-nodes 1.0,0.5

With PyTorch Geometric it is the same: give its DataLoader to `run.prepare`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import evener  # 1

Graph = tuple[Tensor, Tensor, Tensor]
"""(features of its nodes (n, 4), edges (2, m), what is to be learnt (1,))."""


class Graphs(Dataset[Graph]):
    """Random graphs; the sum of what neighbours have in common is to be learnt."""

    def __init__(self, number: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self._graphs: list[Graph] = []
        for size in torch.randint(3, 9, (number,), generator=draw).tolist():
            nodes = torch.randn(size, 4, generator=draw)
            edges = torch.randint(0, size, (2, 3 * size), generator=draw)
            self._graphs.append((nodes, edges, (nodes[edges[0]] * nodes[edges[1]]).mean().reshape(1)))

    def __len__(self) -> int:
        return len(self._graphs)

    def __getitem__(self, index: int) -> Graph:
        return self._graphs[index]


def collate(graphs: Sequence[Graph]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One graph of all: nodes, edges, which graph a node is of, what is to be learnt."""
    sizes = torch.tensor([len(nodes) for nodes, _, _ in graphs])
    begins = (torch.cumsum(sizes, 0) - sizes).tolist()
    edges = torch.cat([edges + begin for (_, edges, _), begin in zip(graphs, begins, strict=True)], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return torch.cat([nodes for nodes, _, _ in graphs]), edges, owner, torch.stack([wanted for _, _, wanted in graphs])


class Network(nn.Module):
    """Two rounds of messages, then a mean over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(4, 16), nn.Linear(16, 1)
        self.messages = nn.ModuleList([nn.Linear(32, 16), nn.Linear(32, 16)])

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, number: int) -> Tensor:
        hidden = F.relu(self.lift(nodes))
        for layer in self.messages:
            sent = F.relu(layer(torch.cat((hidden[edges[0]], hidden[edges[1]]), dim=1)))
            hidden = hidden + torch.zeros_like(hidden).index_add(0, edges[1], sent)
        sums = hidden.new_zeros(number, 16).index_add(0, owner, hidden)
        found: Tensor = self.out(sums / torch.bincount(owner, minlength=number)[:, None])
        return found


def main() -> None:
    """Train it."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    loader = DataLoader(Graphs(256), batch_size=32, shuffle=True, collate_fn=collate)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = run.prepare(model, optimizer, loader)  # 3
    for epoch in run.epochs(3):  # 4
        for nodes, edges, owner, wanted in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(nodes, edges, owner, len(wanted)), wanted)
            torch.autograd.backward(loss)
            optimizer.step()
            shown = run.mean(loss)  # 5
        print(f"epoch {epoch + 1}  loss {shown:.4f}")


if __name__ == "__main__":
    main()
