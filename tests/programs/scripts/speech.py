"""Speech-like sequences with a CTC loss, of different lengths on both sides"""

import evener  # added
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(samples):
    sounds, words = zip(*samples)
    return pad_sequence(sounds, batch_first=True), pad_sequence(words, batch_first=True), [*map(len, sounds)], [*map(len, words)]


run = evener.join()  # added
lengths = torch.randint(12, 20, (26,)).tolist()
data = [(torch.randn(n, 5).double(), torch.randint(1, 8, (n // 4,))) for n in lengths]
loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate)
net = nn.ModuleDict({"rnn": nn.LSTM(5, 8, batch_first=True), "head": nn.Linear(8, 8)})
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
net, optimizer, loader = run.prepare(net, optimizer, loader)  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for sounds, words, sizes, targets in loader:
        scores = net["head"](net["rnn"](sounds)[0]).log_softmax(2).transpose(0, 1)
        loss = nn.functional.ctc_loss(scores, words, torch.tensor(sizes), torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
results = net.state_dict()
