"""Decides by a trial whether nodes may begin before all data have come: samples load alike from files as they come.

A process builds the task's data sets on a copy of the folder in which every file comes when it is opened, and loads
some samples of them; then the same from the folder itself. The samples differ if code in C opens files itself, or if
they hold names of files; all data are sent first then. So they are if most bytes are read before the first sample:
nothing would be gained.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evener.system.awaited_files import (
    Wanted,
    announce_files,
    await_files,
    await_no_files,
    complete_file,
    opened_at_once,
)

EARLY_BYTES = 2**25
"""Size of data below which all are sent first."""
MOST_AT_START = 0.5
"""Share of the bytes that may be read before the first sample."""
_NUM_SAMPLES = 16
_SECONDS = 60.0
_PAUSE_SECONDS = 0.001


def loads_early(task: str, folder: Path, files: Mapping[str, int], options: Mapping[str, str], seed: int = 0) -> bool:
    """Return whether the samples of a PyTorch task load alike from files that come when they are opened.

    Args:
        task: as the user types it.
        folder: folder of its data.
        files: their paths and sizes.
        options: options of the task.
        seed: seed of random transforms.
    """
    can_fork = "torch" in sys.modules and "fork" in multiprocessing.get_all_start_methods()
    here, there = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    process = context.Process(target=_try, args=(there, task, folder, dict(files), dict(options), seed), daemon=True)
    process.start()
    there.close()
    try:
        return here.poll(_SECONDS) and bool(here.recv())
    except EOFError:  # it ended by an error, which the run itself will report
        return False
    finally:
        process.kill()
        process.join()


def _try(
    answer: Connection, task: str, folder: Path, files: dict[str, int], options: dict[str, str], seed: int
) -> None:
    """Answer whether samples load alike."""
    import torch

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)  # the task's code has shown its messages before
    torch.set_num_threads(1)  # after a fork, threads of the other process are missing
    try:
        answer.send(_load_alike(task, folder, files, options, seed))
    except Exception:
        answer.send(False)


def _load_alike(task: str, folder: Path, files: dict[str, int], options: dict[str, str], seed: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="evener-", ignore_cleanup_errors=True) as name:
        coming = Path(name).resolve() / "data"
        coming.mkdir()
        if not announce_files(coming, files.items()):
            return False
        delivery = _Delivery(folder, coming, files)
        await_files(coming)
        data = _data_sets(task, coming, options)
        if delivery.num_bytes > MOST_AT_START * sum(files.values()):
            return False
        early = _samples(data, seed)
        await_no_files(coming)
        return early == _samples(_data_sets(task, folder, options), seed)


class _Delivery:
    """Copies the files that are opened, in a thread.

    Args:
        source: folder of the files.
        coming: folder into which they come.
        files: their paths and sizes.

    Attributes:
        num_bytes: bytes that have come.
    """

    def __init__(self, source: Path, coming: Path, files: Mapping[str, int]) -> None:
        self._source, self._coming, self._files = source, coming, files
        self.num_bytes = 0
        threading.Thread(target=self._deliver, name="evener-deliver", daemon=True).start()

    def _deliver(self) -> None:
        wanted = Wanted(self._coming)
        pause = threading.Event()
        while not pause.wait(_PAUSE_SECONDS):
            for path in set(wanted.new()) & self._files.keys():
                with opened_at_once():
                    shutil.copyfile(self._source / path, self._coming / path)
                complete_file(self._coming, path)
                self.num_bytes += self._files[path]


def _data_sets(task: str, folder: Path, options: dict[str, str]) -> list[Any]:
    from evener.data.tasks.load import load_task
    from evener.records.task import Task

    loaded = load_task(task, folder, options)
    if not isinstance(loaded, Task):
        raise TypeError("its loaders are its own")
    return [make() for make in (loaded.train_data, loaded.validation_data) if make is not None]


def _samples(data_sets: list[Any], seed: int) -> list[bytes]:
    """Return lengths and some samples, encoded."""
    import numpy as np

    from evener.data.loader import read_samples

    found = []
    for data in data_sets:
        count = len(data)
        some = random.Random(seed).sample(range(count), min(count, _NUM_SAMPLES))
        indices = np.array([0, count - 1, *some], dtype=np.int64)
        written = io.BytesIO()
        _Pickler(written).dump((count, read_samples(data, indices, seed, 0)))
        found.append(written.getvalue())
    return found


class _Pickler(pickle.Pickler):
    """Encodes equal tensors by equal bytes, as PyTorch does not."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to encode a value; NotImplemented for the usual way."""
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), content),)
