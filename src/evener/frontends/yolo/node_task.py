"""The task file that is sent to the nodes of a master, on which a model of Ultralytics is to be trained."""

from __future__ import annotations

import json
from pathlib import Path

from evener.frontends.yolo.overrides import require_ultralytics
from evener.records.task import Task


def task(settings: str, architecture: str, data_dir: Path | None = None) -> Task:
    """A training of Ultralytics, whose nodes train by themselves between two merges.

    Args:
        settings: of Ultralytics, as JSON.
        architecture: the model's own description, as JSON; weights come from the master.
        data_dir: folder of the description of the data; None: Ultralytics knows its name.

    Raises:
        MissingExtra: Ultralytics is not installed here.
        InvalidInput: it cannot read the data.
    """
    require_ultralytics()
    from evener.frontends.yolo.local_training import LocalTraining

    return LocalTraining(json.loads(settings), json.loads(architecture), data_dir).task
