"""A rank of a training of Ultralytics on a node of a master: from what was sent there to what the rank runs."""

from __future__ import annotations

import json
import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import SENT_IMAGES, described_here
from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.frontends.yolo.remote_checkpoints import RemoteCheckpoints
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput

if TYPE_CHECKING:
    from evener.frontends.yolo.settings import YoloTraining

FIRST_WEIGHTS = "first.safetensors"
"""Of a `.pt` to begin with, beside the file that a rank runs."""
USER_CODE = "code.pickle"
"""Callbacks and trainer class of a training from Python, beside the file that a rank runs."""
SEARCH_OPTION = "search"
"""Option of a rank whose training is a trial of a search."""


def rank_on_node(env: RankEnvironment, config: RunConfig) -> None:
    """One rank's whole way on a node of a master; the data are where they are on this machine."""
    assert config.output is not None
    settings = json.loads(config.option["overrides"])
    images = settings.pop(SENT_IMAGES, None)
    first = Path(config.task).with_name(FIRST_WEIGHTS)
    if first.exists():
        with alone():
            from evener.frontends.yolo.first_weights import make_first_weights

            settings["model"] = str(make_first_weights(first, config.output / "first"))
    elif (description := Path(config.task).with_name(Path(settings["model"]).name)).exists():
        settings["model"] = str(description)
    if "data" in settings and config.data is not None:
        settings["data"] = str(described_here(config.data, settings["data"], config.output, images))
    settings |= {"save_dir": str(config.output), "exist_ok": "True"}
    yolo = YoloConfig(
        overrides=("train", *(f"{key}={value}" for key, value in settings.items())),
        shares=config.shares,
        elastic=True,  # accelerators of one machine exchange in a way that can be abandoned, too
        patience=env.patience,
        preflight=config.preflight,
        started=config.started,
    )
    code = Path(config.task).with_name(USER_CODE)
    if code.exists():
        _require_same_python(config.option["python"])
    read = partial(_read, code.read_bytes() if code.exists() else b"")
    trial = None
    if config.option.get(SEARCH_OPTION):
        with alone():
            from evener.frontends.yolo.searched_trial import RemoteTrial

            trial = RemoteTrial()
    yolo_rank(env, yolo, RemoteCheckpoints(config.output, resumes=config.resume), read, trial)


def _require_same_python(version: str) -> None:
    """Raise InvalidInput unless this node has the Python that the user's code was pickled with."""
    if version != (own := minor_version()):
        raise InvalidInput(
            f"the callbacks or the trainer come from Python {version}, and this node has {own}, which cannot load "
            "them: use the same version, or submit the training without them"
        )


def minor_version() -> str:
    """Return the version of Python whose programs have one bytecode, such as 3.11."""
    return ".".join(platform.python_version_tuple()[:2])


def _read(code: bytes, config: YoloConfig) -> YoloTraining:
    """Return the training that the overrides describe, with the user's own `code`, if there is any."""
    from evener.frontends.yolo.settings import read_training

    training = read_training(config.overrides)
    if not code:
        return training
    from evener.frontends.yolo.packed_training import with_code

    return with_code(training, code)
