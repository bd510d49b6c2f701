"""A training of the user's own object, packed for the processes of local nodes."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from evener.commands.pickled import pickled
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import YoloTraining


class _PackedParts(NamedTuple):
    """A training for the processes of nodes.

    Attributes:
        model: with its callbacks.
        settings: of Ultralytics.
        trainer: the user's own trainer class; None for that of the task.
        modules: classes of models that the user's script defines, by name: checkpoints name them.
    """

    model: Any
    settings: dict[str, Any]
    trainer: type | None
    modules: dict[str, type]


def packed_training(training: YoloTraining) -> bytes:
    """Pickle a training: of earlier ones, only the weights. Raises InvalidInput: something in it cannot be pickled."""
    model = copy.copy(training.model)
    model.trainer = model.predictor = model.metrics = model.record = model.study = None
    model.ckpt = {"epoch": -1} if model.ckpt else {}
    script = vars(sys.modules["__main__"]).items()
    modules = {
        name: one
        for name, one in script
        if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == "__main__"
    }
    sent = _PackedParts(model, training.settings, training.trainer, modules)
    advice = "define them in a file, and open what they need in the first callback"
    return pickled(sent, "the model, its callbacks or its trainer", advice)


def unpacked_training(packed: bytes) -> YoloTraining:
    """Return the training that `packed_training` has pickled; its folder is not known yet."""
    with alone():
        sent: _PackedParts = pickle.loads(packed)
    vars(sys.modules["__main__"]).update(sent.modules)
    return YoloTraining(sent.model, sent.settings, Path(), sent.trainer)
