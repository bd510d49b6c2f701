"""A training that goes on with the weights of the first one."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    settings = SETTINGS | {"val": False}  # so that the last weights are the best ones
    model.train(**settings)
    model.train(**settings | {"epochs": 2})
    note(model.trainer.save_dir.name)
