"""Decides by a trial whether nodes may begin before all data have come: samples load alike from files as they come.

A process makes the task's data sets, labels and model on a copy of the folder in which every file comes when it is
opened, and loads some batches; then the same from the folder itself. They differ if code in C opens files itself, or if
they hold names of files; all data are sent first then. So they are if the trial opens no file of some suffix, which
other samples may need, and if most bytes are read before the first sample: nothing would be gained.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from evener.records.errors import DoesNotFit
from evener.system.awaited_files import (
    Wanted,
    announce_files,
    await_files,
    await_no_files,
    complete_file,
    opened_at_once,
)
from evener.system.forks import garbage_left_to_parent
from evener.system.process_exit import exit_with_parent

EARLY_BYTES = 2**25
"""Size of data below which all are sent first."""
_MOST_SHARE, _MOST_BYTES = 0.5, 2**28
"""Share and number of the bytes that may be read until some samples are loaded."""
_SHARED_MEMORY = Path("/dev/shm")
"""Where many files are made in little time, if it has room."""
_NUM_SAMPLES = 16
_SECONDS, _STUCK_SECONDS, _LOOK_SECONDS = 60.0, 10.0, 0.5
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
        arguments = there, task, folder, list(files), dict(options), seed, Path(self._scratch.name).resolve()
        self._process = context.Process(target=_try, args=arguments, daemon=True)
        with garbage_left_to_parent():
            self._process.start()
        there.close()

    def succeeds(self) -> bool:
        """Wait for the result: whether samples load alike from files that come when they are opened.

        It is false if the trial takes too long, or waits for a lock that a thread of this process held at the fork.
        """
        used, now = 0.0, time.monotonic()
        end, stuck_at = now + _SECONDS, now + _STUCK_SECONDS
        try:
            while not self._answer.poll(_LOOK_SECONDS):
                now, before = time.monotonic(), used
                used = self._used_seconds()
                stuck_at = now + _STUCK_SECONDS if used > before else stuck_at
                if now > min(end, stuck_at):
                    return False
            return bool(self._answer.recv())
        except EOFError:  # it ended by an error, which the run itself will report
            return False

    def _used_seconds(self) -> float:
        """Return for how long the main thread of the trial has computed; 0 if it has ended."""
        try:
            threads = psutil.Process(self._process.pid).threads()
        except psutil.Error:
            return 0.0
        return sum(thread.user_time + thread.system_time for thread in threads if thread.id == self._process.pid)

    def close(self) -> None:
        """End the process, and remove its files."""
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

    exit_with_parent()
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
    """Yield whether each part of the task is alike, for which alone files come; then whether all suffixes were seen."""
    seen: set[str] = set()
    for kind in ("train_data", "validation_data", "labels", "model"):
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
        seen |= delivery.suffixes
        yield early == load(kind, folder)
    yield seen >= {PurePosixPath(path).suffix for path, size in files.items() if size}


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

    Attributes:
        suffixes: of the files that have come.
    """

    def __init__(self, source: Path, coming: Path, files: Mapping[str, int]) -> None:
        self._source, self._coming, self._files = source, coming, files
        self._bytes_left = min(_MOST_BYTES, int(_MOST_SHARE * sum(files.values())))
        self.suffixes: set[str] = set()
        threading.Thread(target=self._deliver, name="evener-deliver", daemon=True).start()

    def require_few(self) -> None:
        """Raise DoesNotFit if so many bytes are read that nothing is gained."""
        if self._bytes_left < 0:
            raise DoesNotFit("most of the data are read at the start")

    def _deliver(self) -> None:
        wanted, remaining = Wanted(self._coming), set(self._files)
        while self._bytes_left >= 0:
            for path in set(wanted.new()) & remaining:
                remaining.remove(path)  # it may be requested again before it has come
                self._bytes_left -= self._files[path]
                self.suffixes.add(PurePosixPath(path).suffix)
                if self._bytes_left >= 0:
                    self._copy(path)
            time.sleep(_PAUSE_SECONDS)

    def _copy(self, path: str) -> None:
        try:
            with opened_at_once():
                shutil.copyfile(self._source / path, self._coming / path)
            complete_file(self._coming, path)
        except OSError:  # no room, or it is gone
            self._bytes_left = -1


def _samples(task: str, options: dict[str, str], seed: int, kind: str, folder: Path) -> bytes:
    """Return a digest of a part of the task on data in `folder`: of the length and some batches of a data set.

    Nothing is digested if the task has no such part.

    Raises:
        TypeError: it is no task whose samples are loaded by number.
    """
    import numpy as np

    from evener.data.loader import collect, seed_all
    from evener.data.tasks.load import load_task
    from evener.records.task import Task

    loaded = load_task(task, folder, options)
    if not isinstance(loaded, Task):
        raise TypeError("its loaders are its own")
    if (make := getattr(loaded, kind)) is None:
        return b""
    seed_all(seed)
    made, digest = make(), _Digest()
    if kind == "model":
        _Pickler(digest).dump(dict(made.state_dict()))
    elif kind == "labels":
        _Pickler(digest).dump(np.asarray(made))
    else:
        count = len(made)
        some = random.Random(seed).sample(range(count), min(count, _NUM_SAMPLES))
        indices = np.array([0, count - 1, *some], dtype=np.int64)
        for epoch in range(2):
            _Pickler(digest).dump((count, collect(made, indices, seed, epoch)))
    return digest.sha256.digest()


class _Digest:
    """A file object that hashes the bytes written to it (SHA-256)."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Take bytes."""
        self.sha256.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """Encodes equal tensors by equal bytes, as PyTorch does not."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to encode a value; NotImplemented for the usual way."""
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), content),)
