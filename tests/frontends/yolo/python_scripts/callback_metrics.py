"""A callback that reads losses and metrics after every epoch."""

from settings import SETTINGS, note
from ultralytics import YOLO


def after_epoch(trainer):
    losses = trainer.label_loss_items(trainer.tloss, prefix="train")
    note({"epoch": trainer.epoch, "names": sorted(losses), "metrics": sorted(trainer.metrics)})


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_fit_epoch_end", after_epoch)
    model.train(**SETTINGS)
