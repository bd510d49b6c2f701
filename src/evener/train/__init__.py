"""One rank's way through a run: steps, validation, checkpoints, and what is told of them."""

from evener.train.checkpoint import Checkpoints
from evener.train.loop import Run, train
from evener.train.settings import Settings

__all__ = ["Checkpoints", "Run", "Settings", "train"]
