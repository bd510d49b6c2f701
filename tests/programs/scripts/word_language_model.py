"""An LSTM language model in the manner of PyTorch's example: columns of text, a state that is carried along."""

import evener  # added
import torch
import torch.nn.functional as F
from torch import nn, optim


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(15, 6), nn.LSTM(6, 8, 2), nn.Linear(8, 15)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out).flatten(0, 1), hidden


run = evener.join()  # added
source = torch.randint(0, 15, (8 * 31,)).view(8, -1).t().contiguous()
model = RNNModel()
optimizer = optim.SGD(model.parameters(), lr=0.5)
model, optimizer = run.prepare(model, optimizer)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    hidden = None
    for i in range(0, 30, 6):
        x, y = run.share((source[i : i + 6], source[i + 1 : i + 7]), dim=1)  # was: x, y = source[i : i + 6], source[i + 1 : i + 7]
        hidden = None if hidden is None else tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        output, hidden = model(x, hidden)
        F.cross_entropy(output, y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
results = model.state_dict()
