"""A model from weights that were saved before."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    YOLO("yolov8n.yaml").save("start.pt")
    model = YOLO("start.pt")
    model.train(**SETTINGS)
    note(model.model.names)
