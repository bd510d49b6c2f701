"""A trainer class that judges models in its own way."""

from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer


class LossTrainer(DetectionTrainer):
    def validate(self):
        metrics, _ = super().validate()
        fitness = -sum(value for name, value in metrics.items() if name.startswith("val/"))
        if self.best_fitness is None or fitness > self.best_fitness:
            self.best_fitness = fitness
        return metrics, fitness


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=LossTrainer, **SETTINGS)
    note(model.trainer.best.exists())
