"""A forked copy of a rank: it continues the program for a few batches, writes its results, and ends.

It has shared memory of its own, so that the rank never sees what the replica writes:

    up to 64 MB, 256 MB in all    a copy, which all mappings of the same memory share
    larger, with a file           a copy of each page that the replica writes; others may show later changes of the rank
    larger, without a file        a copy, if the machine has twice as much memory left

Such memory belongs to `numpy.memmap`, to tensors after `share_memory_()`, and to `multiprocessing`, where a lock that
another process holds stays locked in the replica. Only Linux says where it is; elsewhere it stays shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.abortable_group import AbortableProcessGroup
from evener.comm.group import Group
from evener.comm.mesh_joining import join_mesh
from evener.frontends.programs.batch_parts import BatchPart
from evener.frontends.programs.replica_files import discard_writes, separate_open_files
from evener.launch.rank_environment import RankEnvironment
from evener.launch.store import connect_store
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput, TrainingFailed, first_line, place_of
from evener.system.forks import garbage_left_to_parent
from evener.system.memory import usable_memory

_NO_FILE = "anon_inode:"
"""Path of memory of the kernel, such as the rings of an io_uring, by which PyTorch's store listens under torchrun."""
_MAPS, _MEMORY, _DESCRIPTORS = Path("/proc/self/maps"), Path("/proc/self/mem"), Path("/proc/self/fd")
_MAX_COPY_BYTES, _MAX_COPIED_BYTES = 64 * 2**20, 256 * 2**20
"""Largest copy of the memory of one file, and of all together."""
_LINE = re.compile(r"(\w+)-(\w+) (...)s (\w+) (\w+:\w+ \d+) *(.*)")
_PIECE_BYTES = 16 * 2**20
"""Size of the pieces in which memory is copied."""
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 1, 2, 16
"""Values of Linux."""


class _Mapping(NamedTuple):
    """Memory that other processes may share.

    Attributes:
        start: address of its first byte.
        size: bytes.
        protection: whether it may be read, written, executed, as bits of mmap(2).
        offset: of its first byte in the file.
        path: of the file, which ends with " (deleted)" if it was removed.
    """

    start: int
    size: int
    protection: int
    offset: int
    path: str


def separate_shared_memory() -> None:
    """Replace shared memory by memory of this process alone, at the same addresses and with the same contents.

    Raises:
        OSError: it cannot be replaced.
    """
    copied = 0
    for inode, mappings in _written_files().items():
        extent = max(one.offset + one.size for one in mappings) - min(one.offset for one in mappings)
        size = min(extent, sum(one.size for one in mappings))  # the rings of an io_uring are far apart, and small
        is_small = size <= min(_MAX_COPY_BYTES, _MAX_COPIED_BYTES - copied)
        descriptor = None if is_small else _opened(inode, mappings[0].path)
        kind = _MAP_SHARED if descriptor is None else _MAP_PRIVATE
        if descriptor is None:
            descriptor, copied = _copied(mappings, size), copied + size
        for one in mappings:
            _map(one, kind, descriptor)
        os.close(descriptor)


def _written_files() -> dict[str, list[_Mapping]]:
    """Return the shared mappings of each file that this process may write through one of them, by device and inode."""
    files = defaultdict[str, list[_Mapping]](list)
    lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if _MAPS.exists() else []
    for match in filter(None, map(_LINE.fullmatch, lines)):
        start, end, letters, offset, inode, path = match.groups()
        protection = sum(bit for bit, letter in zip((1, 2, 4), letters, strict=True) if letter != "-")
        first = int(start, 16)
        file = f"{inode} {start}" if path.startswith(_NO_FILE) else inode  # all of these have one inode
        files[file].append(_Mapping(first, int(end, 16) - first, protection, int(offset, 16), path))
    return {inode: mappings for inode, mappings in files.items() if any(one.protection & 2 for one in mappings)}


def _copied(mappings: Sequence[_Mapping], size: int) -> int:
    """Return the descriptor of a new file without a name that has the contents of all mappings. Raises OSError."""
    if size > usable_memory()[1] // 2:
        raise OSError(f"there is no memory for a copy of {size} shared bytes")
    descriptor = os.memfd_create("evener")
    os.ftruncate(descriptor, max(one.offset + one.size for one in mappings))
    with _MEMORY.open("rb", buffering=0) as memory:
        for one in mappings:
            for begin in range(0, one.size, _PIECE_BYTES):
                with suppress(OSError):  # the file has become shorter, so this piece cannot be read
                    piece = os.pread(memory.fileno(), min(_PIECE_BYTES, one.size - begin), one.start + begin)
                    os.pwrite(descriptor, piece, one.offset + begin)
    return descriptor


def _opened(inode: str, path: str) -> int | None:
    """Return a new descriptor of a file; None if it has no name, or was removed and is not open here.

    Raises:
        OSError: the file cannot be opened.
    """
    if path and not path.endswith(" (deleted)") and not path.startswith(_NO_FILE):
        return os.open(path, os.O_RDONLY)
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it belonged to the listing
            if descriptor.stat().st_ino == int(inode.split()[1]) and os.readlink(descriptor) == path:
                return os.open(descriptor, os.O_RDONLY)
    return None


def _map(mapping: _Mapping, kind: int, descriptor: int) -> None:
    """Map a file in place of shared memory. Raises OSError."""
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
    start, size, protection, offset, _ = mapping
    if mmap(start, size, protection, kind | _MAP_FIXED, descriptor, offset) != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


SECONDS = 30
"""Time after which a copy has failed, while its ranks wait for it."""
BACKGROUND_SECONDS = 600
"""The same while they train: others may use the CPUs."""
_BEGIN_SECONDS, _TRIES = 5, 3
_HERE, _SEPARATE, _MAX_REPORT_BYTES = b"here", b"separate", 1024
"""Reports of a copy that has begun, and that shares nothing with its rank; else it reports an error."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""


def forked() -> int:
    """Fork this process; return 0 in the copy, and the process id of the copy in the parent.

    A copy may hang before its first line: Python 3.11 waits there for a lock that another thread held during the fork.
    Such a copy is killed and forked again. The parent waits until the copy has its own files and memory.

    Raises:
        TrainingFailed: no copy has begun, or it cannot have its own files and memory.
    """
    for _ in range(_TRIES):
        reading, writing = os.pipe()
        with warnings.catch_warnings(), open(reading, "rb", buffering=0) as reports:
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the copy does not use
            try:
                with garbage_left_to_parent():
                    pid = os.fork()
            except OSError:
                os.close(writing)
                raise
            if pid == 0:
                _separate_from_rank(writing)
                return pid
            os.close(writing)
            has_begun = _is_readable(reading, _BEGIN_SECONDS) and reports.read(len(_HERE)) == _HERE
            report = reports.read(_MAX_REPORT_BYTES) if has_begun and _is_readable(reading, SECONDS) else b""
        if report == _SEPARATE:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if report:
            why = report.decode(errors="replace")
            raise TrainingFailed(f"a copy of this process cannot have files and memory of its own: {why}")
    what = f"a copy of this process did not begin within {_BEGIN_SECONDS} s, {_TRIES} times"
    raise TrainingFailed(f"{what}: start the program again, when the machine is less busy")


def _separate_from_rank(writing: int) -> None:
    """Share no files, memory or connections with the rank; report by `writing` that this copy has begun, and the end.

    The rank waits for that, since it would change what has not been copied yet.
    """
    try:
        os.write(writing, _HERE)
        separate_shared_memory()
        separate_open_files(needed=(writing,))
        util._run_after_forkers()  # type: ignore[attr-defined]  # proxies of managers open connections of their own
        os.write(writing, _SEPARATE)
        os.close(writing)
    except BaseException as error:
        try:
            reason = getattr(error, "strerror", None) or first_line(error)
            os.write(writing, reason.encode()[:_MAX_REPORT_BYTES])
        finally:  # this process must not go on as if it were the rank
            os._exit(1)


def _is_readable(descriptor: int, seconds: float) -> bool:
    """Whether data, or the end, arrive within `seconds`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def end_with_parent() -> None:
    """Let this process end with its parent, where the system supports that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def leave_workers_alone() -> None:
    """Raise InvalidInput on reads from workers of the program, which load batches for its rank, in this process."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInput("a copy does not read from workers of the program")

    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    iterator.__next__, iterator.__del__ = refuse, lambda _: None


def failure(path: Path) -> str:
    """Return why the replica that writes `path` failed; empty if it did not."""
    reason = path.with_suffix(".failed")
    if reason.exists():
        return reason.read_text()
    return "" if path.exists() else "it took too long, or ended without a result"


class ForkedReplica(ABC):
    """A forked copy of this rank.

    Args:
        group: the rank's; `begin` turns this object into the group of the replicas.
        path: of its results.
        samples: largest number of samples of a batch.
        moves_parts: whether replicas exchange parts of tensors, which needs Gloo.

    Attributes:
        samples: largest number of samples of a batch.
        seconds: time after which it has failed.
        is_delayed: whether the program computes batches later than it loads them.
        has_others: whether it trains on batches from elsewhere while a divided one is current.
    """

    seconds = SECONDS
    is_delayed = has_others = False

    def __init__(self, group: Group, path: Path, samples: int, moves_parts: bool = False) -> None:
        self.group, self.path, self.samples, self._moves_parts = group, path, samples, moves_parts
        self._kept: list[Any] = []

    def begin(self, env: RankEnvironment, token: str | None) -> None:
        """Join the other replicas under `token`, or run alone without one."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(self.seconds)
        end_with_parent()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        discard_writes(self.path.parent)
        with self:
            self._regroup(env, token)

    @abstractmethod
    def sizes(self, count: int) -> Sequence[int]:
        """Return the samples of every replica in a batch of `count`."""

    def prepare_batch(self, batch: Any, _part: BatchPart) -> Any:
        """Convert this replica's part of a batch for the program."""
        return batch

    @abstractmethod
    def begin_step(self, owner: object, part: BatchPart) -> None:
        """Handle that the program begins to train on `part`, loaded by `owner`."""

    @abstractmethod
    def next_batch(self) -> None:
        """Handle that the program loads another batch."""

    @abstractmethod
    def end_pass(self, *, is_over: bool) -> None:
        """Handle that the program has left a loop that trains: at the end of the loader (`is_over`), or before it."""

    @abstractmethod
    def before_update(self) -> None:
        """Handle that the program is about to update weights."""

    @abstractmethod
    def end_step(self, owner: object) -> None:
        """Handle that `owner` loads another batch or ends, so that its last one is over."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write the results to `path`."""

    def end(self) -> NoReturn:
        """Write the results and exit."""
        with self:
            part = self.path.with_suffix(".part")
            self.write(part)
            os.replace(part, self.path)
        os._exit(0)

    def __enter__(self) -> Self:
        """End the replica on an error inside."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Write why the program failed, and exit."""
        with contextlib.suppress(OSError):
            sentence = first_line(error)
            if not isinstance(error, InvalidInput):
                sentence = f"{type(error).__name__}: {sentence}{place_of(error)}"
            atomic_write(self.path.with_suffix(".failed"), sentence.encode())
        os._exit(1)

    def _regroup(self, env: RankEnvironment, token: str | None) -> None:
        """Turn the rank's group into that of the replicas."""
        group = self.group
        # their threads do not exist in the copy, so these are neither ended nor used, as by Lightning's collectives
        self._kept += [group.process_group, group.mesh, group.reports, dist.GroupMember.WORLD]
        dist.GroupMember.WORLD = None
        group.process_group = group.reports = group.mesh = None
        group.timer.pace.speed = 1.0
        if token is None:
            group.rank, group.size, group.nodes = 0, 1, group.nodes[:1]
            return
        assert env.store is not None
        inner = env.store.inner
        store = connect_store(inner.host, inner.port, env.store.secret, patience=self.seconds)
        group.mesh = join_mesh(
            rank=group.rank,
            nodes=group.nodes,
            store=store.under(f"equivalence/{token}"),
            address=env.address,
            patience=self.seconds,
            longest_wait=self.seconds,
        )
        if self._moves_parts:
            place = GlooPlace(
                store=store.under(f"equivalence/{token}/gloo"),
                rank=group.rank,
                size=group.size,
                longest_wait=self.seconds,
            )
            group.sums = AbortableGloo(place.join(), place)
            group.process_group = AbortableProcessGroup(group.rank, group.size, group.sums)
