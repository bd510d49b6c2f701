"""Every event of a training, counted."""

from functools import partial

from settings import SETTINGS, note
from ultralytics import YOLO


def seen(event, _component):
    note(event)


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    for event in list(model.callbacks):
        model.add_callback(event, partial(seen, event))
    model.train(**SETTINGS)
