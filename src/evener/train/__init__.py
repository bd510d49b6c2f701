"""One rank's way through a run: steps, validation, checkpoints, and what is told of them.

`settings`, which has no PyTorch in it, is imported by machines without; what is named here, when it is first asked for.
"""

from typing import TYPE_CHECKING

from evener.lazy import lazily

if TYPE_CHECKING:
    from evener.train.checkpoint import Checkpoints, save_weights
    from evener.train.history import History
    from evener.train.loop import train
    from evener.train.precision import Arithmetic
    from evener.train.run import Run
    from evener.train.settings import Settings

__all__ = ["Arithmetic", "Checkpoints", "History", "Run", "Settings", "save_weights", "train"]

_HOMES = {
    "Arithmetic": "precision",
    "Checkpoints": "checkpoint",
    "History": "history",
    "Run": "run",
    "Settings": "settings",
    "save_weights": "checkpoint",
    "train": "loop",
}

__getattr__ = lazily(__name__, _HOMES)
