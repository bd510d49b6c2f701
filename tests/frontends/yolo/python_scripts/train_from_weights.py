"""A model from weights that were saved before."""

import torch
from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    torch.manual_seed(0)
    YOLO("yolov8n.yaml").save("start.pt")
    model = YOLO("start.pt")
    model.train(**SETTINGS)
    note(model.model.names)
