"""A callback that copies every checkpoint."""

import shutil

from settings import SETTINGS, note
from ultralytics import YOLO


def keep(trainer):
    copy = trainer.save_dir / f"epoch{trainer.epoch}.pt"
    shutil.copy(trainer.last, copy)
    note(copy.name)


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_model_save", keep)
    model.train(**SETTINGS)
