"""A batch that follows the memory of the devices; on CPUs it is 16 images."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS | {"batch": -1})
    note(model.task)
