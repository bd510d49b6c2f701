"""A callback that seeds the random numbers, as ClearML does, before the weights are drawn."""

import torch
from settings import SETTINGS, note
from ultralytics import YOLO


def seed(_trainer):
    torch.manual_seed(1337)
    note("seeds")


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_pretrain_routine_start", seed)
    model.train(**SETTINGS)
