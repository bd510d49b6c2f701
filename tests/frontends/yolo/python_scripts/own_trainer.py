"""A trainer class with a line of its own in the log."""

from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer


class LoggingTrainer(DetectionTrainer):
    def progress_string(self):
        text = super().progress_string()
        return f"{text} of {self.args.name}"


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=LoggingTrainer, **SETTINGS)
    note(model.task)
