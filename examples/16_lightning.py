"""Lightning's Trainer on uneven nodes: one argument.

evener run examples/16_lightning.py --local-nodes 1.0,0.5                   needs: pip install -e '.[lightning]'
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.data.digits import load_digits
from evener.frontends.integrations.lightning import EvenerStrategy


class Classifier(lightning.LightningModule):
    """Digits by two layers and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train it."""
    torch.manual_seed(0)
    images, labels = load_digits()
    data = TensorDataset(torch.from_numpy(images).float().flatten(1) / 16, torch.from_numpy(labels).long())
    trainer = lightning.Trainer(
        strategy=EvenerStrategy(),
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
    print(f"loss {float(trainer.callback_metrics['loss_epoch']):.4f}")


if __name__ == "__main__":
    main()
