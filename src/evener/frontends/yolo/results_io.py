"""Results of a training of Ultralytics as tensors and text: its own files are pickles, which are not sent.

The machine that submits a training unpickles nothing from the nodes.
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
    """Write the weights of best.pt and last.pt and the lines of results.csv of a training into `file`."""
    tensors: dict[str, Tensor] = {}
    for name in KEPT:
        path: Path = getattr(trainer, name)
        if path.exists():
            tensors |= {f"{name}.{key}": value for key, value in read_weights(path).items()}
    lines = trainer.csv.read_text() if trainer.csv.exists() else ""
    atomic_write(file, save(apart(tensors), {_RESULTS: lines}))


def restore_results(
    model: nn.Module, train_args: Mapping[str, Any], file: Path, folder: Path, names: Sequence[str] = KEPT
) -> None:
    """Write the files of Ultralytics into `folder` from what `write_results` wrote into `file`.

    Args:
        model: of that training; it has other weights afterwards.
        train_args: settings of Ultralytics, which a checkpoint holds.
        file: see above.
        folder: of the run.
        names: of the checkpoints.
    """
    with safe_open(file, framework="pt") as results:
        for name in names:
            prefix = f"{name}."
            keys = [key for key in results.keys() if key.startswith(prefix)]  # noqa: SIM118 - it is no dict
            weights = {key.removeprefix(prefix): results.get_tensor(key) for key in keys}
            if weights:
                model.load_state_dict(weights)
                write_checkpoint(model.half(), train_args, folder / "weights" / f"{name}.pt")
        if lines := (results.metadata() or {}).get(_RESULTS):
            (folder / _RESULTS).write_text(lines)
