"""A BART that translates padded sentences: its loss is a mean over the labels that are no padding"""
# needs: transformers

import evener  # added
import torch
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    words = pad([one for one, _ in samples], batch_first=True)
    labels = pad([other for _, other in samples], batch_first=True, padding_value=-100)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


run = evener.join()  # added
data = [(torch.randint(1, 30, (int(n),)), torch.randint(1, 30, (int(n) // 2 + 1,))) for n in torch.randint(4, 12, (30,))]
loader = DataLoader(data, batch_size=7, shuffle=True, collate_fn=collate)
model = BartForConditionalGeneration(BartConfig(vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
    max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    forced_eos_token_id=2))  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(model, optimizer, loader, count=lambda b: (b["labels"] != -100).sum())  # added
model.train()
for epoch in run.epochs(2):  # was: for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
results = model.state_dict()
