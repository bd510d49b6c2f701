"""A classifier of a folder of images."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n-cls.yaml")
    results = model.train(**SETTINGS | {"data": "classes"})
    note(sorted(results.results_dict))
