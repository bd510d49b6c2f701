"""A rank of a training of Ultralytics on a node of a master: from what was sent there to what the rank runs."""

from __future__ import annotations

import json
from pathlib import Path

from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import described_here
from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.frontends.yolo.remote_checkpoints import RemoteCheckpoints
from evener.launch.rank_environment import RankEnvironment

FIRST_WEIGHTS = "first.safetensors"
"""Of a `.pt` to begin with, beside the file that a rank runs."""


def rank_on_node(env: RankEnvironment, config: RunConfig) -> None:
    """One rank's whole way on a node of a master; the data are where they are on this machine."""
    assert config.output is not None
    settings = json.loads(config.option["overrides"])
    first = Path(config.task).with_name(FIRST_WEIGHTS)
    if first.exists():
        with alone():
            from evener.frontends.yolo.first_weights import make_first_weights

            settings["model"] = str(make_first_weights(first, config.output / "first"))
    if "data" in settings and config.data is not None:
        settings["data"] = str(described_here(config.data, settings["data"], config.output))
    settings |= {"save_dir": str(config.output), "exist_ok": "True"}
    yolo = YoloConfig(
        overrides=("train", *(f"{key}={value}" for key, value in settings.items())),
        shares=config.shares,
        patience=env.patience,
        preflight=config.preflight,
        started=config.started,
    )
    yolo_rank(env, yolo, RemoteCheckpoints(config.output, resumes=config.resume))
