"""All classes as one, and a part of the layers that is not trained."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS, single_cls=True, freeze=[0, 1, 2])
    note(model.model.names)
