"""A training that is resumed from a checkpoint of its second epoch."""

import shutil
from pathlib import Path

from settings import SETTINGS, note
from ultralytics import YOLO


def keep(trainer):
    if trainer.epoch == 1:
        shutil.copytree(trainer.save_dir, "stopped/train")


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_fit_epoch_end", keep)
    model.train(**SETTINGS)
    model = YOLO("stopped/train/weights/last.pt")
    model.train(resume=True)
    note(Path(model.trainer.save_dir).name)
