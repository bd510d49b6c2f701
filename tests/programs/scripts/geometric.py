"""A graph network of PyTorch Geometric, with its own loader, on graphs of different sizes"""
# needs: torch_geometric

import evener  # added
import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = GCNConv(4, 8), GCNConv(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x, edges, batch):
        h = self.first(x, edges).relu()
        return self.out(global_mean_pool(self.second(h, edges).relu(), batch))


run = evener.join()  # added
graphs = []
for index in range(30):
    n = int(torch.randint(3, 8, ()))
    graphs.append(Data(x=torch.randn(n, 4).double(), edge_index=torch.randint(0, n, (2, 3 * n)), y=torch.tensor([index % 3])))
loader = DataLoader(graphs, batch_size=7, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for data in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y).backward()
        optimizer.step()
results = model.state_dict()
