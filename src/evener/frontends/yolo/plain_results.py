"""What a training of Ultralytics has come to, as numbers and words: files of its own are pickles, which do not travel.

Whoever asks a master's nodes for a training unpickles nothing of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from evener.frontends.yolo.run_folder import read_weights, write_checkpoint
from evener.records.atomic import atomic_write
from evener.training.checkpoint import apart

KEPT = ("best", "last")
"""Checkpoints of Ultralytics, by what precedes the names of their weights."""
_RESULTS = "results.csv"


def write_results(trainer: Any, file: Path) -> None:
    """Write into `file` what a training has come to: weights of best.pt and last.pt, and the lines of results.csv."""
    tensors: dict[str, Tensor] = {}
    for name in KEPT:
        path: Path = getattr(trainer, name)
        if path.exists():
            tensors |= {f"{name}.{key}": value for key, value in read_weights(path).items()}
    lines = trainer.csv.read_text() if trainer.csv.exists() else ""
    atomic_write(file, save(apart(tensors), {_RESULTS: lines}))


def restore_results(
    model: nn.Module, train_args: Mapping[str, Any], file: Path, folder: Path, kept: Sequence[str] = KEPT
) -> None:
    """Write the files of Ultralytics into `folder` from what `write_results` wrote into `file`.

    Args:
        model: of that training; it has other weights afterwards.
        train_args: settings of Ultralytics, which a checkpoint holds.
        file: see above.
        folder: of the run.
        kept: which checkpoints.
    """
    with safe_open(file, framework="pt") as left:
        for name in kept:
            prefix = f"{name}."
            names = [key for key in left.keys() if key.startswith(prefix)]  # noqa: SIM118 - it is no dict
            weights = {key.removeprefix(prefix): left.get_tensor(key) for key in names}
            if weights:
                model.load_state_dict(weights)
                write_checkpoint(model.half(), train_args, folder / "weights" / f"{name}.pt")
        if lines := (left.metadata() or {}).get(_RESULTS):
            (folder / _RESULTS).write_text(lines)
