"""Lightning's Trainer with BatchNorm, accumulation, clipping, a schedule and a validation"""
# needs: lightning

import lightning as L
import torch
import torch.nn.functional as F
from evener.frontends.integrations.lightning import EvenerStrategy  # added
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)}


x = torch.randn(60, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
loader = DataLoader(data, batch_size=8, shuffle=True)
others = DataLoader(TensorDataset(x[:20] + 0.1, data.tensors[1][:20]), batch_size=8)
model = Classifier()
words = dict(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu", logger=False,
             enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
trainer = L.Trainer(strategy=EvenerStrategy(), **words)  # was: trainer = L.Trainer(**words)
trainer.fit(model, loader, others)
results = {**model.state_dict(), "validation": trainer.callback_metrics["val_loss"]}
