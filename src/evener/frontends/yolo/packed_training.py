"""A training of the user's own object, packed for the processes of local nodes or for the nodes of a master.

The processes of local nodes unpickle the whole object. Nodes of a master receive model and weights as text and numbers;
what is pickled for them is the user's own code: callbacks, the trainer class, classes of models.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from ultralytics.utils.callbacks.base import get_default_callbacks

from evener.commands.pickled import pickled
from evener.data.tasks.load import needing_extras
from evener.frontends.yolo.callbacks import without_trackers
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import YoloTraining
from evener.records.errors import InvalidInput, first_line

_ADVICE = "define them in a file, and open what they need in the first callback"
_SCALARS = (str, int, float, bool, Path)
Classes = dict[str, dict[str, type]]
"""Classes of models by module and name."""


class _PackedParts(NamedTuple):
    """A training for the processes of nodes.

    Attributes:
        model: with its callbacks.
        settings: of Ultralytics.
        trainer: the user's own trainer class; None for that of the task.
        classes: classes of models that the user's script defines, by module and name: checkpoints name them.
    """

    model: Any
    settings: dict[str, Any]
    trainer: type | None
    classes: Classes


def packed_training(training: YoloTraining) -> bytes:
    """Pickle a training: of earlier ones, only the weights. Raises InvalidInput: something in it cannot be pickled."""
    model = copy.copy(training.model)
    model.trainer = model.predictor = model.metrics = model.record = model.study = None
    model.ckpt = {"epoch": -1} if model.ckpt else {}
    sent = _PackedParts(model, training.settings, training.trainer, _model_classes([sys.modules["__main__"]]))
    return pickled(sent, "the model, its callbacks or its trainer", _ADVICE)


def unpacked_training(packed: bytes) -> YoloTraining:
    """Return the training that `packed_training` has pickled; its folder is not known yet."""
    with alone():
        sent: _PackedParts = pickle.loads(packed)
    _define(sent.classes)
    return YoloTraining(sent.model, sent.settings, Path(), sent.trainer)


class _PackedCode(NamedTuple):
    """The code of a training that is the user's own, for the nodes of a master.

    Attributes:
        callbacks: all of the training, by event; None for those of Ultralytics.
        settings: those that are no text and no numbers.
        trainer: the user's own trainer class; None for that of the task.
        classes: as for local nodes.
    """

    callbacks: dict[str, list[Callable[[Any], object]]] | None
    settings: dict[str, Any]
    trainer: type | None
    classes: Classes


def is_text(value: Any) -> bool:
    """Return whether a setting can be written as a word of a command."""
    if isinstance(value, list | tuple):
        return all(isinstance(one, _SCALARS) for one in value)
    return isinstance(value, _SCALARS) and value != ""


def packed_code(training: YoloTraining) -> bytes:
    """Pickle the user's own code of a training, with the modules beside the script; empty if there is none.

    Raises:
        MissingExtra: cloudpickle is not installed.
        InvalidInput: something in it cannot be pickled.
    """
    callbacks = without_trackers(training.model.callbacks)
    settings = {name: value for name, value in training.settings.items() if value is not None and not is_text(value)}
    modules = [sys.modules["__main__"], *_modules_of_script()]
    sent = _PackedCode(
        callbacks=None if callbacks == without_trackers(get_default_callbacks()) else callbacks,
        settings={name: value for name, value in settings.items() if not isinstance(value, str)},
        trainer=training.trainer,
        classes=_model_classes(modules),
    )
    if sent.callbacks is None and not (sent.settings or sent.trainer or sent.classes):
        return b""
    with _sent_by_value(modules[1:]):
        return pickled(sent, "the callbacks, the trainer or a setting", _ADVICE)


def with_code(training: YoloTraining, packed: bytes) -> YoloTraining:
    """Return `training` with the code that `packed_code` has pickled. Raises InvalidInput: this node cannot load it."""
    try:
        sent: _PackedCode = pickle.loads(packed)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            f"the callbacks or the trainer of the script cannot be loaded here ({first_line(error)}): install on this "
            "node what they import, and import modules beside the script at its top"
        ) from error
    _define(sent.classes)
    if sent.callbacks is not None:
        training.model.callbacks.clear()
        training.model.callbacks.update(sent.callbacks)
    return training._replace(settings={**training.settings, **sent.settings}, trainer=sent.trainer)


def _model_classes(modules: Iterable[ModuleType]) -> Classes:
    """Return the classes of models that these modules define."""
    found = {
        module.__name__: {
            name: one
            for name, one in vars(module).items()
            if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == module.__name__
        }
        for module in modules
    }
    return {name: classes for name, classes in found.items() if classes}


def _define(classes: Classes) -> None:
    """Define classes of models in this process where checkpoints name them."""
    for name, own in classes.items():
        vars(sys.modules.setdefault(name, ModuleType(name))).update(own)


def _modules_of_script() -> list[ModuleType]:
    """Return the modules that are imported from the folder of the script or notebook, which nodes of a master lack."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    modules = [one for name, one in list(sys.modules.items()) if one is not None and name == one.__name__]
    return [one for one in modules if one.__name__ != "__main__" and _is_imported_from(folder, one)]


def _is_imported_from(folder: Path, module: ModuleType) -> bool:
    """Return whether a module, or its package, is imported by being in `folder`."""
    name = module.__name__.partition(".")[0]
    top = sys.modules.get(name)
    file = getattr(top, "__file__", None)
    if file is None or name in ("ultralytics", "evener") or "site-packages" in folder.parts:
        return False
    place = Path(file).resolve().parent
    return folder == (place.parent if hasattr(top, "__path__") else place)


@contextmanager
def _sent_by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Inside, what these modules define is pickled with its code. Raises MissingExtra: cloudpickle is not installed."""
    with needing_extras():
        import cloudpickle
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
