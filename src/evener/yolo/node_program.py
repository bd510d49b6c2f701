"""The file that is sent to the nodes of a master whose ranks are to train a model of Ultralytics together."""

from __future__ import annotations

import importlib.util
from typing import Any

from evener.errors import MissingExtra
from evener.run.config import RunConfig


def rank_program(env: Any, config: RunConfig) -> None:
    """What a rank runs.

    Raises:
        MissingExtra: Ultralytics is not installed here.
        InvalidInput: it cannot read the data.
    """
    if importlib.util.find_spec("ultralytics") is None:
        raise MissingExtra("YOLO needs Ultralytics, which is not installed: pip install 'evener[ultralytics]'")
    from evener.yolo.hosted import hosted_rank

    hosted_rank(env, config)
