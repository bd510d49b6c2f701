"""Ranks of a training of Ultralytics that work together on the nodes of a master: what each runs, and what it leaves.

The first one leaves the weights of best.pt and last.pt, and the lines of results.csv, as numbers and words: whoever
asked for the training unpickles nothing of a node's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from evener.atomic import atomic_write
from evener.launch.rank_environment import RankEnvironment
from evener.ps.collective.rank_session import WEIGHTS
from evener.run.checkpoint import apart
from evener.run.config import RunConfig
from evener.yolo.data_place import described_here
from evener.yolo.rank import yolo_rank
from evener.yolo.run_folder import read_weights, write_checkpoint
from evener.yolo.words import YoloConfig

KEPT = ("best", "last")
"""Checkpoints of Ultralytics, by what precedes the names of their weights."""
_RESULTS = "results.csv"


def hosted_rank(env: RankEnvironment, config: RunConfig) -> None:
    """One rank's whole way on a node of a master; the data are where they are on this machine."""
    words = json.loads(config.option["words"])
    named = [word for word in words if not word.startswith("data=")]
    data = next((word.removeprefix("data=") for word in words if word.startswith("data=")), None)
    assert config.output is not None
    if data is not None:
        place = data if config.data is None else described_here(config.data, data, config.output)
        named.append(f"data={place}")
    asked = YoloConfig(
        words=(*named, f"save_dir={config.output}", "exist_ok=True"),
        shares=config.shares,
        patience=env.patience,
        preflight=config.preflight,
        started=config.started,
    )
    yolo_rank(env, asked, partial(leave_weights, file=config.output / WEIGHTS))


def leave_weights(trainer: Any, file: Path) -> None:
    """Leave in `file` what a training has come to."""
    tensors: dict[str, Tensor] = {}
    for name in KEPT:
        path: Path = getattr(trainer, name)
        if path.exists():
            tensors |= {f"{name}.{key}": value for key, value in read_weights(path).items()}
    lines = trainer.csv.read_text() if trainer.csv.exists() else ""
    atomic_write(file, save(apart(tensors), {_RESULTS: lines}))


def write_checkpoints(model: nn.Module, train_args: Mapping[str, Any], file: Path, folder: Path) -> None:
    """Write best.pt, last.pt and results.csv into `folder` as Ultralytics does, from what a rank has left in `file`.

    Args:
        model: of that training.
        train_args: settings of Ultralytics, which a checkpoint holds.
        file: see `leave_weights`.
        folder: of the run.
    """
    with safe_open(file, framework="pt") as left:
        for name in KEPT:
            prefix = f"{name}."
            names = [key for key in left.keys() if key.startswith(prefix)]  # noqa: SIM118 - it is no dict
            weights = {key.removeprefix(prefix): left.get_tensor(key) for key in names}
            if weights:
                model.load_state_dict(weights)
                write_checkpoint(model, train_args, folder / "weights" / f"{name}.pt")
        if lines := (left.metadata() or {}).get(_RESULTS):
            (folder / _RESULTS).write_text(lines)
