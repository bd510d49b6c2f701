"""A training with the size of images that the file of the model names, and with weights that are drawn again."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    settings = {name: value for name, value in SETTINGS.items() if name != "imgsz"}
    YOLO("yolov8n.yaml").train(**settings | {"epochs": 1}, imgsz=96)
    model = YOLO("runs/train/weights/last.pt")
    model.train(**settings, pretrained=False)
    note([model.trainer.args.imgsz, model.trainer.save_dir.name])
