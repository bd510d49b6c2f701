"""The doctor's look at a task: whether it can be loaded here, and facts of its training data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evener.data.tasks.load import blaming, has_thin_task, is_path, load_any_task, load_thin_task
from evener.doctor.peers import DataFacts
from evener.records.errors import EvenerError
from evener.records.schema import shown
from evener.system.host import version_of

_SEED = 0


class TaskLook(NamedTuple):
    """The result of loading a task.

    Attributes:
        problem: why the task, or its data, cannot be loaded here; empty if they can.
        data: its training data; None if they cannot be loaded, or come as a stream.
    """

    problem: str = ""
    data: DataFacts | None = None


def look_at_task(
    task: str, data: Path | None = None, options: Mapping[str, str] = {}, *, thin: bool = False
) -> TaskLook:
    """Load a task and its training data.

    Args:
        task: name, or path of a file.
        data: folder of its data.
        options: of the task, as text.
        thin: whether NumPy computes here even if PyTorch is installed.
    """
    is_thin = has_thin_task(task) and (thin or not version_of("torch"))
    try:
        with blaming(Path(task).resolve()) if is_path(task) else nullcontext():
            if is_thin:
                return TaskLook(data=_facts_of_arrays(*load_thin_task(task, data, options).train_data()))
            return TaskLook(data=_facts_of_dataset(load_any_task(task, data, options).train_data()))
    except EvenerError as error:
        return TaskLook(problem=shown(str(error)))


def _facts_of_arrays(*arrays: np.ndarray[Any, Any]) -> DataFacts:
    """Return facts of NumPy data, with a fingerprint of the first, the middle and the last sample."""
    hasher, count = hashlib.sha256(), len(arrays[0])
    for array in arrays:
        for index in _samples(len(array)):
            hasher.update(np.ascontiguousarray(array[index]).tobytes())
    return DataFacts(samples=count, fingerprint=f"NumPy:{hasher.hexdigest()}")


def _facts_of_dataset(dataset: Any) -> DataFacts | None:
    """Return facts of a PyTorch data set, with a fingerprint of samples that do not change between reads."""
    if not hasattr(dataset, "__len__"):
        return None
    from evener.data.alike import steady_print

    prints = [f"{steady_print(dataset, index, _SEED):.9g}" for index in _samples(len(dataset))]
    return DataFacts(samples=len(dataset), fingerprint=f"PyTorch:{' '.join(prints)}")


def _samples(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []
