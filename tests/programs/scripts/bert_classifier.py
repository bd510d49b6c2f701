"""A BERT that classifies padded sentences, in the manner of transformers' example without its Trainer"""
# needs: transformers

import evener  # added
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def collate(samples):
    words = torch.nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": torch.tensor([y for _, y in samples])}


run = evener.join()  # added
data = [(torch.randint(1, 30, (int(n),)), int(n) % 3) for n in torch.randint(4, 12, (40,))]
loader = DataLoader(data, batch_size=7, shuffle=True, collate_fn=collate)
model = BertForSequenceClassification(BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_labels=3,
    num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    max_position_embeddings=16))  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
scheduler = get_linear_schedule_with_warmup(optimizer, 3, 2 * len(loader))
model.train()
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
results = model.state_dict()
