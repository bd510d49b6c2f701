"""Training, validation of the result, and a prediction with it."""

from settings import SETTINGS, note
from ultralytics import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(**SETTINGS)
    metrics = model.val(data=SETTINGS["data"], imgsz=64, plots=False)
    note(metrics.box.maps.shape)
    (result,) = model.predict("data/images/val/000.png", imgsz=64, verbose=False)
    note(result.orig_shape)
