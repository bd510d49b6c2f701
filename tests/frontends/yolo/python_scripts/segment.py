"""Masks of objects."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n-seg.yaml")
    results = model.train(**SETTINGS | {"data": "segments/data.yaml"})
    note(sorted(results.results_dict))
