"""Data loading processes (`--workers`): how their failures reach the rank, and how they end with it.

An error in such a process comes out of PyTorch's DataLoader as its class with a traceback for a sentence. Loaded
samples lie in /dev/shm, which containers keep small: a process that finds it full says so here.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from evener.records.error_kind import ErrorKind, kind_of
from evener.records.errors import DoesNotFit, EvenerError, TrainingFailed, first_line, place_of, text_of
from evener.system.awaited_files import await_files_in_process
from evener.system.device_failures import failure_behind
from evener.system.process_exit import exit_with_parent
from evener.tracer.nested import map_tensors

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
_STORAGE = str(Path(torch.__file__).parent / "storage.py")
_SHARING = ("_new_shared", "_share_fd_cpu_", "_share_filename_cpu_")
"""Functions of PyTorch's that move tensors to shared memory."""
_DIED = "DataLoader worker (pid"
"""With which PyTorch begins to tell that a loading process has died; it has no class for that."""


@dataclass(frozen=True)
class LoadingFailure:
    """The failure that a loading process returns in place of samples.

    Attributes:
        kind: of the error.
        sentence: of the error.
    """

    kind: ErrorKind
    sentence: str


def load_in_process(load: Callable[[], Any], *, explains: bool) -> Any:
    """Return the result of `load` in shared memory, or its failure. In the rank's own process, return it as is.

    Args:
        load: loads samples.
        explains: whether an error of the data set becomes a TrainingFailed that names the line, as in the rank's own
            process; else the loader raises it as PyTorch does.
    """
    if get_worker_info() is None:
        return load()
    try:
        return map_tensors(load(), _share)
    except EvenerError as error:
        return LoadingFailure(kind_of(error), str(error))
    except Exception as error:
        if _is_of_sharing(error):
            full: EvenerError = DoesNotFit(f"loaded samples do not fit the shared memory: {_shared_memory()}")
            return LoadingFailure(kind_of(full), str(full))
        if explains and failure_behind(error, "cpu") is None and (place := place_of(error)):
            failed = TrainingFailed(f"{type(error).__name__}: {error}{place}")
            return LoadingFailure(kind_of(failed), str(failed))
        raise


def received(batches: Iterator[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
    """Yield the batches that loading processes, or this one, have loaded. Raises EvenerError: one of them failed."""
    for part, loaded in batches:
        if isinstance(loaded, LoadingFailure):
            raise loaded.kind.as_error(loaded.sentence)
        yield part, loaded


def begin_process(number: int, init: Callable[[int], None] | None = None) -> None:
    """Have a loading process end with its rank; then call the `worker_init_fn` of the user's loader."""
    exit_with_parent()
    await_files_in_process()
    if init is not None:
        init(number)


def loading_death(error: Exception) -> EvenerError | None:
    """Return the error for a loading process that died; None if `error` is about something else."""
    if not isinstance(error, RuntimeError) or not text_of(error).startswith(_DIED):
        return None
    return TrainingFailed(f"a process that loads data died ({first_line(error)}): {_shared_memory()}")


def _share(tensor: Tensor) -> Tensor:
    """Move `tensor` to shared memory. Left to itself, PyTorch does so in a thread whose failures are lost."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _is_of_sharing(error: Exception) -> bool:
    """Whether `error` was raised when a tensor was moved to shared memory."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, RuntimeError) and last.filename == _STORAGE and last.name in _SHARING


def _shared_memory() -> str:
    """How much there is, and what to do if it is too little."""
    cure = "use --workers 0, or start the container with more (--shm-size=1g)"
    if not hasattr(os, "statvfs"):
        return cure
    try:
        volume = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return cure
    total, free = (blocks * volume.f_frsize / 1e6 for blocks in (volume.f_blocks, volume.f_bavail))
    return f"{_SHARED_MEMORY} has {total:.4g} MB, {free:.4g} MB of them free; {cure}"
