"""A translation-like model on padded sentences: its loss is a mean over the tokens that are no padding."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import evener  # added

PAD = 0


def collate(samples):
    tokens = pad_sequence(samples, batch_first=True, padding_value=PAD)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "mask": None}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=PAD)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, mask=None):
        return {"logits": self.head(self.rnn(self.embed(input_ids))[0])}


run = evener.join()  # added
sentences = [torch.randint(1, 20, (int(n),)) for n in torch.randint(3, 12, (60,))]
loader = DataLoader(sentences, batch_size=13, shuffle=True, collate_fn=collate)
model = Model()
optimizer = optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda batch: (batch["labels"] != PAD).sum())  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for batch in loader:
        logits = model(batch["input_ids"], mask=batch["mask"])["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
results = model.state_dict()
