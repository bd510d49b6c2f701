"""A trainer class with an optimizer of its own choice."""

import torch
from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer


class MomentumTrainer(DetectionTrainer):
    def build_optimizer(self, model, *arguments, **named):
        return torch.optim.SGD([{"params": list(model.parameters()), "param_group": "weight"}], lr=1e-3, momentum=0.5)


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=MomentumTrainer, **SETTINGS)
    note(model.task)
