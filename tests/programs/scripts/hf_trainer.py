"""Hugging Face's Trainer with a GPT-2 on padded sentences: its loss is a mean over tokens, two batches a step"""
# needs: transformers

import tempfile

import torch
from evener.frontends.integrations.transformers import EvenerTrainer  # added
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    words = pad(samples, batch_first=True)
    return {"input_ids": words, "labels": pad(samples, batch_first=True, padding_value=-100)}


data = [torch.randint(1, 30, (int(n),)) for n in torch.randint(4, 12, (40,))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                                   embd_pdrop=0.0, attn_pdrop=0.0))  # fmt: skip
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=6, num_train_epochs=2,
    gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    learning_rate=1e-2, remove_unused_columns=False)  # fmt: skip
trainer = EvenerTrainer(model, arguments, collate, data)  # was: trainer = Trainer(model, arguments, collate, data)
trainer.train()
results = model.state_dict()
