"""A callback that is removed again, and one in its place."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_train_end", lambda trainer: note("first"))
    model.clear_callback("on_train_end")
    model.add_callback("on_train_end", lambda trainer: note("second"))
    model.train(**SETTINGS)
