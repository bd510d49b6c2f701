"""One rank's way through a run: steps, validation, checkpoints, and what is told of them."""

from evener.train.checkpoint import Checkpoints, save_weights
from evener.train.history import History
from evener.train.loop import train
from evener.train.precision import Arithmetic
from evener.train.run import Run
from evener.train.settings import Settings

__all__ = ["Arithmetic", "Checkpoints", "History", "Run", "Settings", "save_weights", "train"]
