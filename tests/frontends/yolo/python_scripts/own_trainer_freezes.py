"""A trainer class that freezes the first layers."""

from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer


class FreezingTrainer(DetectionTrainer):
    def get_model(self, cfg=None, weights=None, verbose=True):
        model = super().get_model(cfg, weights, verbose)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith(("model.0.", "model.1."))
        return model


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=FreezingTrainer, **SETTINGS, freeze=2)
    note(model.task)
