"""The file that is sent to the nodes of a master whose ranks are to train a model of Ultralytics together."""

from __future__ import annotations

from typing import Any

from evener.config.run_config import RunConfig
from evener.frontends.yolo.overrides import require_ultralytics


def rank_program(env: Any, config: RunConfig) -> None:
    """Run one rank.

    Raises:
        MissingExtra: Ultralytics is not installed here.
        InvalidInput: it cannot read the data.
    """
    require_ultralytics()
    from evener.frontends.yolo.rank_on_node import rank_on_node

    rank_on_node(env, config)
