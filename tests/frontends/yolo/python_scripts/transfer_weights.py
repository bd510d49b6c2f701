"""A model from its description, with weights of another one."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    YOLO("yolov8n.yaml").save("start.pt")
    model = YOLO("yolov8n.yaml").load("start.pt")
    results = model.train(**SETTINGS)
    note(len(results.maps))
