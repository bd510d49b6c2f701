"""A subclass of YOLO whose trainings have settings of its own."""

from settings import SETTINGS, note
from ultralytics import YOLO


class SlowYOLO(YOLO):
    def train(self, *arguments, **named):
        return super().train(*arguments, **{"momentum": 0.5, **named})


if __name__ == "__main__":
    model = SlowYOLO("yolov8n.yaml")
    model.train(**SETTINGS)
    note(model.trainer.args.momentum)
