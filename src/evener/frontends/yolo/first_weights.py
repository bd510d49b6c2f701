"""The model of a `.pt` with which a training begins, sent to nodes that lack the file as numbers and text.

A `.pt` is a pickle, and no node reads one of another machine: each makes its own from the model's description and
weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from ultralytics.models.yolo.model import YOLO

from evener.frontends.yolo.run_folder import write_checkpoint
from evener.training.checkpoint import apart

_NAME, _TASK, _ARCHITECTURE, _SETTINGS = "name", "task", "architecture", "settings"


def write_first_weights(model: Any, file: Path) -> None:
    """Write `model`, a `YOLO` that has weights of a `.pt`, into `file` for other nodes."""
    metadata = {
        _NAME: Path(getattr(model, "ckpt_path", None) or "first.pt").name,
        _TASK: model.task,
        _ARCHITECTURE: json.dumps(model.model.yaml, default=str),
        _SETTINGS: json.dumps(model.overrides, default=str),
    }
    save_file(apart(model.model.state_dict()), file, metadata)


def make_first_weights(file: Path, folder: Path) -> Path:
    """Make the `.pt` for Ultralytics in `folder` from a file of `write_first_weights`; return its path."""
    with safe_open(file, framework="pt") as sent:
        metadata = sent.metadata()
    architecture = json.loads(metadata[_ARCHITECTURE])
    description = folder / Path(architecture["yaml_file"]).name  # Ultralytics tells the size of a model by this name
    description.parent.mkdir(parents=True, exist_ok=True)
    description.write_text(yaml.safe_dump(architecture))
    model = YOLO(str(description), task=metadata[_TASK]).model
    model.load_state_dict(load_file(file))
    made = folder / Path(metadata[_NAME]).name
    write_checkpoint(model, json.loads(metadata[_SETTINGS]), made)
    return made
