"""`YOLO` of Ultralytics, whose trainings use uneven machines: `from evener.yolo import YOLO`."""

from evener.frontends.yolo.model import YOLO

__all__ = ["YOLO"]
