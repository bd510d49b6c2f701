"""A model class with another activation, which the script itself defines."""

from settings import SETTINGS, note
from torch import nn
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import DetectionModel


class Softened(nn.Module):
    def forward(self, x):
        return x * 0.9


class OwnModel(DetectionModel):
    def init_criterion(self):
        return super().init_criterion()


class OwnTrainer(DetectionTrainer):
    def get_model(self, cfg=None, weights=None, verbose=True):
        model = OwnModel(cfg, ch=3, nc=self.data["nc"], verbose=False)
        model.model[0].act = nn.Sequential(nn.SiLU(), Softened())
        return model


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=OwnTrainer, **SETTINGS)
    note(type(model.model).__name__)
    note(type(model.model.model[0].act[1]).__name__)
