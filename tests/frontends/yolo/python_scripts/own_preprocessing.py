"""A trainer class that darkens the images of every batch."""

from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer


class DarkTrainer(DetectionTrainer):
    def preprocess_batch(self, batch):
        batch = super().preprocess_batch(batch)
        batch["img"] = batch["img"] * 0.5
        return batch


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=DarkTrainer, **SETTINGS)
    note(model.task)
