"""Other schedules and settings by name."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS | {"cos_lr": True, "lrf": 0.1, "weight_decay": 0.0, "close_mosaic": 0})
    note(model.task)
