"""A trainer class whose images are inverted."""

from settings import SETTINGS, note
from ultralytics import YOLO
from ultralytics.data import YOLODataset
from ultralytics.models.yolo.detect import DetectionTrainer


class InvertedDataset(YOLODataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        sample["img"] = 255 - sample["img"]
        return sample


class InvertingTrainer(DetectionTrainer):
    def build_dataset(self, img_path, mode="train", batch=None):
        dataset = super().build_dataset(img_path, mode, batch)
        if mode == "train":
            dataset.__class__ = InvertedDataset
        return dataset


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.train(trainer=InvertingTrainer, **SETTINGS)
    note(model.task)
