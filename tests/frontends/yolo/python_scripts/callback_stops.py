"""A callback that ends the training after the second epoch."""

from settings import SETTINGS, note
from ultralytics import YOLO


def stop(trainer):
    trainer.stop = trainer.epoch == 1


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_fit_epoch_end", stop)
    model.train(**SETTINGS | {"epochs": 6})
    note((model.trainer.save_dir / "weights" / "last.pt").exists())
