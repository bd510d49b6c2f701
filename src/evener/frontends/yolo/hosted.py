"""A rank of a training of Ultralytics on a node of a master: from what was sent there to what the rank runs."""

from __future__ import annotations

import json
from pathlib import Path

from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import described_here
from evener.frontends.yolo.masters_checkpoints import MastersCheckpoints
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.frontends.yolo.words import YoloConfig
from evener.launch.rank_environment import RankEnvironment

FIRST_WEIGHTS = "first.safetensors"
"""Of a `.pt` to begin with, beside the file that a rank runs."""


def hosted_rank(env: RankEnvironment, config: RunConfig) -> None:
    """One rank's whole way on a node of a master; the data are where they are on this machine."""
    assert config.output is not None
    words = json.loads(config.option["words"])
    first = Path(config.task).with_name(FIRST_WEIGHTS)
    if first.exists():
        with alone():
            from evener.frontends.yolo.first_weights import make_first_weights

            words["model"] = str(make_first_weights(first, config.output / "first"))
    if "data" in words and config.data is not None:
        words["data"] = str(described_here(config.data, words["data"], config.output))
    words |= {"save_dir": str(config.output), "exist_ok": "True"}
    asked = YoloConfig(
        words=("train", *(f"{key}={value}" for key, value in words.items())),
        shares=config.shares,
        patience=env.patience,
        preflight=config.preflight,
        started=config.started,
    )
    yolo_rank(env, asked, MastersCheckpoints(config.output, resumes=config.resume))
