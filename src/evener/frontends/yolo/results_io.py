"""Results of a training of Ultralytics as tensors, numbers and text: its own files are pickles, which are not sent.

The machine that submits a training unpickles nothing from the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from evener.frontends.yolo.run_folder import read_weights, write_checkpoint
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile
from evener.records.schema import NOT_DECODED
from evener.training.checkpoint import apart

KEPT = ("best", "last")
"""Checkpoints of Ultralytics, by what precedes the names of their weights."""
_RESULTS = "results.csv"
_METRICS = "metrics"
_ARRAY = "array"
"""Key of an array in messages, whose value is its kind of numbers, its shape and its bytes."""
_OF_TRAINER = ("fitness", "best_fitness", "epoch", "epochs", "start_epoch", "metrics")
"""Attributes of a trainer that belong to the results of its training."""


def write_results(trainer: Any, file: Path, *, metrics: bytes = b"") -> None:
    """Write the weights of best.pt and last.pt and the lines of results.csv of a training into `file`.

    Args:
        trainer: of Ultralytics.
        file: see above.
        metrics: from `encode_metrics`, of a training that is over.
    """
    tensors: dict[str, Tensor] = {}
    for name in KEPT:
        path: Path = getattr(trainer, name)
        if path.exists():
            tensors |= {f"{name}.{key}": value for key, value in read_weights(path).items()}
    if metrics:
        tensors[_METRICS] = torch.frombuffer(bytearray(metrics), dtype=torch.uint8)
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


def encode_metrics(trainer: Any) -> bytes:
    """Return the metrics of the best weights of a training, and what its trainer says of it, without code.

    Metrics of the user's own that are more than numbers, text and arrays are left out; then this is empty.
    """
    own = {name: getattr(trainer, name, None) for name in _OF_TRAINER}
    metrics = getattr(trainer.validator, "metrics", None)
    try:
        return msgspec.msgpack.encode(_plain({"trainer": own, "metrics": vars(metrics) if metrics else {}}))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""


def read_metrics(file: Path, metrics: Any) -> dict[str, Any]:
    """Let `metrics` have the values of those in a file of `write_results`.

    Args:
        file: may hold no metrics, after a training that was stopped.
        metrics: of Ultralytics, for the task of that training.

    Returns:
        What the trainer says of the training, by attribute; empty without metrics.

    Raises:
        InvalidFile: the file holds something else.
    """
    with safe_open(file, framework="pt") as results:
        if _METRICS not in results.keys():  # noqa: SIM118 - it is no dict
            return {}
        tensor = results.get_tensor(_METRICS)
    try:
        data = tensor.view(torch.uint8).numpy().tobytes()
        content = _with_arrays(decode_msgpack(data))
        _fill(metrics, content["metrics"])
        return {name: content["trainer"][name] for name in _OF_TRAINER}
    except (*NOT_DECODED, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise InvalidFile(f"the metrics that came from the nodes cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    """Return `value` for a message: numbers, text, arrays, attributes of Ultralytics' objects; None for all else."""
    if isinstance(value, np.ndarray):
        is_numbers = value.dtype.kind in "biuf"
        return {_ARRAY: [value.dtype.str, value.shape, value.tobytes()]} if is_numbers else _plain(value.tolist())
    if isinstance(value, np.generic | Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _plain(vars(value)) if type(value).__module__.startswith("ultralytics.") else None


def _with_arrays(value: Any) -> Any:
    """Return what `_plain` was given, but for objects, whose attributes remain a dictionary."""
    if isinstance(value, list):
        return [_with_arrays(one) for one in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [_ARRAY]:
        kind, shape, data = value[_ARRAY]
        return np.frombuffer(data, kind).reshape(shape).copy()
    return {name: _with_arrays(one) for name, one in value.items()}


def _fill(target: Any, values: Mapping[str, Any]) -> None:
    """Set the attributes of `target` and of the objects in it; those that its class defines stay as they are."""
    for name, value in values.items():
        current = getattr(target, name, None)
        if hasattr(type(target), name):
            continue
        if isinstance(value, dict) and hasattr(current, "__dict__"):
            _fill(current, value)
        else:
            setattr(target, name, value)
