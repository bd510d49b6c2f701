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
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evener.records.errors import DoesNotFit
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
_MOST_SHARE, _MOST_BYTES = 0.5, 2**28
"""Share and number of the bytes that may be read until some samples are loaded."""
_SHARED_MEMORY = Path("/dev/shm")
"""Where many files are made in little time, if it has room."""
_NUM_SAMPLES = 16
_SECONDS = 60.0
_PAUSE_SECONDS = 0.001


class EarlyTrial:
    """A trial of a PyTorch task, in a copy of this process that goes on beside it; only Linux makes such copies safely.

    Args:
        task: as the user types it.
        folder: folder of its data.
        files: their paths.
        options: options of the task.
        seed: seed of random transforms.
    """

    def __init__(
        self, task: str, folder: Path, files: Sequence[str], options: Mapping[str, str], seed: int = 0
    ) -> None:
        self._answer, there = multiprocessing.Pipe(duplex=False)
        context: Any = multiprocessing.get_context("fork")
        self._scratch = tempfile.TemporaryDirectory(prefix="evener-", dir=_folder(), ignore_cleanup_errors=True)
        words = there, task, folder, list(files), dict(options), seed, Path(self._scratch.name).resolve()
        self._process = context.Process(target=_try, args=words, daemon=True)
        self._process.start()
        there.close()

    def succeeds(self) -> bool:
        """Wait for the result: whether samples load alike from files that come when they are opened."""
        try:
            return self._answer.poll(_SECONDS) and bool(self._answer.recv())
        except EOFError:  # it ended by an error, which the run itself will report
            return False
        finally:
            self._process.kill()
            self._process.join()
            self._scratch.cleanup()


def _try(
    answer: Connection,
    task: str,
    folder: Path,
    files: list[str],
    options: dict[str, str],
    seed: int,
    scratch: Path,
) -> None:
    """Answer whether samples load alike; files come below `scratch`."""
    import torch

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)  # the task's code has shown its messages before
    torch.set_num_threads(1)  # after a fork, threads of the other process are missing
    try:
        sizes = {path: (folder / path).stat().st_size for path in files}
        load = partial(_samples, task, options, seed)
        answer.send(sum(sizes.values()) >= EARLY_BYTES and all(_load_alike(load, folder, sizes, scratch)))
    except Exception:
        answer.send(False)


def _load_alike(
    load: Callable[[str, Path], bytes], folder: Path, files: Mapping[str, int], scratch: Path
) -> Iterator[bool]:
    """Yield whether samples of each data set load alike; its files come for it alone."""
    for kind in ("train_data", "validation_data"):
        coming = scratch / kind
        coming.mkdir()
        if not announce_files(coming, files.items()):
            yield False
            return
        delivery = _Delivery(folder, coming, files)
        await_files(coming, delivery.require_few)
        early = load(kind, coming)
        delivery.require_few()
        await_no_files(coming)
        yield early == load(kind, folder)


def _folder() -> Path | None:
    """Return the folder of the trial; None for the usual one of temporary files."""
    try:
        return _SHARED_MEMORY if shutil.disk_usage(_SHARED_MEMORY).free > 2 * _MOST_BYTES else None
    except OSError:
        return None


class _Delivery:
    """Copies the files that are opened, in a thread.

    Args:
        source: folder of the files.
        coming: folder into which they come.
        files: their paths and sizes.
    """

    def __init__(self, source: Path, coming: Path, files: Mapping[str, int]) -> None:
        self._source, self._coming, self._files = source, coming, files
        self._bytes_left = min(_MOST_BYTES, int(_MOST_SHARE * sum(files.values())))
        threading.Thread(target=self._deliver, name="evener-deliver", daemon=True).start()

    def require_few(self) -> None:
        """Raise DoesNotFit if so many bytes are read that nothing is gained."""
        if self._bytes_left < 0:
            raise DoesNotFit("most of the data are read at the start")

    def _deliver(self) -> None:
        wanted = Wanted(self._coming)
        pause = threading.Event()
        while not pause.wait(_PAUSE_SECONDS):
            for path in set(wanted.new()) & self._files.keys():
                self._bytes_left -= self._files[path]
                if self._bytes_left < 0:
                    return
                with opened_at_once():
                    shutil.copyfile(self._source / path, self._coming / path)
                complete_file(self._coming, path)


def _samples(task: str, options: dict[str, str], seed: int, kind: str, folder: Path) -> bytes:
    """Return the length and some samples of a data set in `folder`, encoded; nothing if the task has no such data.

    Raises:
        TypeError: it is no task whose samples are loaded by number.
    """
    import numpy as np

    from evener.data.loader import read_samples
    from evener.data.tasks.load import load_task
    from evener.records.task import Task

    loaded = load_task(task, folder, options)
    if not isinstance(loaded, Task):
        raise TypeError("its loaders are its own")
    if (make := getattr(loaded, kind)) is None:
        return b""
    data = make()
    count = len(data)
    some = random.Random(seed).sample(range(count), min(count, _NUM_SAMPLES))
    indices = np.array([0, count - 1, *some], dtype=np.int64)
    written = io.BytesIO()
    _Pickler(written).dump((count, read_samples(data, indices, seed, 0)))
    return written.getvalue()


class _Pickler(pickle.Pickler):
    """Encodes equal tensors by equal bytes, as PyTorch does not."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to encode a value; NotImplemented for the usual way."""
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), content),)
