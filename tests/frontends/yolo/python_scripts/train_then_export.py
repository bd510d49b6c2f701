"""Training, and the result in another format."""

from pathlib import Path

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS)
    note(Path(model.export(format="torchscript", imgsz=64)).name)
