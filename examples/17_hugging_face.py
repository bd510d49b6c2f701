"""Hugging Face's Trainer on uneven nodes: another class, the same arguments. The loss is a mean over tokens, and exact.

evener run examples/17_hugging_face.py --local-nodes 1.0,0.5             needs: pip install -e '.[transformers]'
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainingArguments

from evener.frontends.integrations.transformers import EvenerTrainer


def collate(sentences: list[Tensor]) -> dict[str, Any]:
    """Padded words, and labels that leave the padding out."""
    words = pad_sequence(sentences, batch_first=True)
    return {"input_ids": words, "labels": pad_sequence(sentences, batch_first=True, padding_value=-100)}


def main() -> None:
    """Train a small GPT-2 on sentences that count upwards."""
    torch.manual_seed(0)
    begins, lengths = torch.randint(1, 20, (160,)).tolist(), torch.randint(4, 12, (160,)).tolist()
    data = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, **none))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,  # of all nodes together
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = EvenerTrainer(model, arguments, collate, data)
        trainer.remove_callback(PrinterCallback)  # which prints times as well
        found = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {found.training_loss:.4f}")


if __name__ == "__main__":
    main()
