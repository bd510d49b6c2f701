"""A model from its description."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    results = model.train(**SETTINGS)
    note(sorted(results.results_dict))
    note(model.task)
