"""A run with a name of its own, and checkpoints of every epoch."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS, name="mine", exist_ok=True, save_period=1)
    note(model.trainer.save_dir.name)
