"""A callback that remembers something between epochs, in the process where it runs."""

from settings import SETTINGS, note
from ultralytics import YOLO


def counting():
    epochs = []

    def count(trainer):
        epochs.append(trainer.epoch)
        note(list(epochs))

    return count


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_train_epoch_end", counting())
    model.train(**SETTINGS)
