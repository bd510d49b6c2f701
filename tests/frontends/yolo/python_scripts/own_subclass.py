"""A subclass of YOLO whose trainings have settings of its own."""

from settings import SETTINGS, note
from ultralytics import YOLO


class SmallYOLO(YOLO):
    def train(self, *arguments, **named):
        return super().train(*arguments, **{"imgsz": 32, **named})


if __name__ == "__main__":
    model = SmallYOLO("yolov8n.yaml")
    settings = {key: value for key, value in SETTINGS.items() if key != "imgsz"}
    model.train(**settings)
    note(model.model.args["imgsz"])
