"""From the arguments of a user to settings of Ultralytics, and the folder of a run, as `yolo` would choose it."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

from ultralytics.cfg import get_cfg, get_save_dir, smart_value
from ultralytics.models.yolo.model import YOLO
from yaml import YAMLError

from evener.frontends.yolo.overrides import TASKS, checkpoint_of, read_overrides
from evener.records.errors import InvalidInput

_OF_FILES = (OSError, RuntimeError, LookupError, ValueError, AssertionError)
"""What Ultralytics raises while it reads descriptions, images, labels and checkpoints."""
_OF_MODELS = (*_OF_FILES, TypeError, AttributeError, NameError, SyntaxError, EOFError, UnpicklingError, YAMLError)
"""What it raises where a file is no model."""
_LONGEST = 300
"""Characters of what it raises that are told."""
AS_THEY_ARE = ("name", "project", "save_dir", "model", "data")
"""Settings that are text, and never numbers or None."""


class YoloTraining(NamedTuple):
    """A training of Ultralytics, ready to run.

    Attributes:
        model: of it, not yet in training.
        settings: by name, with their values.
        folder: where the results go.
        trainer: the user's own trainer class; None: that of the model's task.
    """

    model: Any
    settings: dict[str, Any]
    folder: Path
    trainer: type | None = None


def typed(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with their values, from text."""
    return {key: value if key in AS_THEY_ARE else smart_value(value) for key, value in settings.items()}


def read_training(overrides: tuple[str, ...], model: Any = None) -> YoloTraining:
    """Return the training that `overrides` describe.

    Args:
        overrides: words of the user.
        model: to take in place of the one that they name; None: that one.

    Raises:
        InvalidInput: Ultralytics does not know a setting, a value or the model, or it is of another task.
    """
    chosen = read_overrides(overrides)
    last = checkpoint_of(chosen)
    settings = typed(chosen)
    task = settings.pop("task", None)
    if last is not None:
        settings |= {"model": str(last), "resume": str(last), "save_dir": str(last.parents[1])}
    name = settings.pop("model")
    try:
        get_cfg(overrides=dict(settings))
    except (SyntaxError, TypeError, ValueError, OSError, AssertionError) as error:
        raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error
    model = _read_model(name, task) if model is None else model
    settings["save_dir"] = str(get_save_dir(get_cfg(overrides={**settings, "task": model.task, "mode": "train"})))
    return YoloTraining(model, settings, Path(settings["save_dir"]))


def _read_model(name: str, task: str | None) -> Any:
    """The model of a file or a name that Ultralytics knows. Raises InvalidInput: it is none, or of another task."""
    try:
        model = YOLO(name)  # by its layers: of a named task it would make another model of the same file
    except FileNotFoundError as error:
        advice = "give the path of a .yaml or .pt, or a name that Ultralytics knows, such as yolov8n.yaml"
        raise InvalidInput(f"Ultralytics: there is no model {name}: {advice}") from error
    except OSError as error:
        raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error
    except _OF_MODELS as error:
        why = f"{type(error).__name__}: {plain_sentence(error)}"
        raise InvalidInput(f"Ultralytics: {name} is no model that it can read: {why}") from error
    if model.task not in TASKS:
        raise InvalidInput(f"the task of {name} is {model.task}; Evener trains {', '.join(TASKS)}")
    if task is not None and task != model.task:
        raise InvalidInput(f"{name} is a model to {model.task}, not to {task}")
    return model


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Turn errors of Ultralytics about the user's files into one sentence, inside this context."""
    try:
        yield
    except _OF_FILES as error:
        raise InvalidInput(f"Ultralytics: {plain_sentence(error)}") from error


@contextmanager
def quiet_ultralytics() -> Iterator[None]:
    """Inside, Ultralytics tells errors alone."""
    logger = logging.getLogger("ultralytics")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def plain_sentence(error: BaseException) -> str:
    """Return the message of `error` in one line of bounded length, without emoji and colour codes."""
    message = re.sub(r"[^\x20-\x7e\s]|\[\d+m", "", str(error) or type(error).__name__)
    return textwrap.shorten(re.sub(r"\s+\.", ".", message), _LONGEST, placeholder=" ...").removesuffix(".")
