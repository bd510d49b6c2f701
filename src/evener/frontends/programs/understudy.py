"""A copy of a rank: it goes on with the program for a few batches, writes what came of them, and ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.abortable_group import AbortableProcessGroup
from evener.comm.group import Group
from evener.comm.mesh_joining import join_mesh
from evener.frontends.programs.batch_parts import BatchPart
from evener.launch.rank_environment import RankEnvironment
from evener.launch.store import connect_store
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput, TrainingFailed, first_line, place_of

SECONDS = 30
"""After which a copy is given up."""
_BEGIN_SECONDS, _TRIES = 5, 3
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = frozenset({"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"})
"""What Python tells of before it changes files."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""


def forked() -> int:
    """A copy of this process: 0 in the copy, its number in the process that it was made of.

    A copy may stand still before its first line: Python 3.11 waits there for a lock that a thread, which is not in the
    copy, held when it began or ended. Such a one is ended, and another one made.

    Raises:
        TrainingFailed: none has begun.
    """
    for _ in range(_TRIES):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: none is used there
            pid = os.fork()
        if pid == 0:
            os.write(writing, b"here")
        os.close(writing)
        has_begun = pid == 0 or _is_readable(reading)
        os.close(reading)
        if has_begun:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    what = f"a copy of this process did not begin within {_BEGIN_SECONDS} s, {_TRIES} times"
    raise TrainingFailed(f"{what}: start the program again, when the machine is less busy")


def _is_readable(descriptor: int) -> bool:
    """Whether something comes there within the time that a copy has to begin."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * _BEGIN_SECONDS))


def end_with_parent() -> None:
    """From now on, this process ends with the one that it is a copy of, where the system can say so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def leave_alone(folder: Path) -> None:
    """From now on, whatever this process does to what the rank itself uses raises InvalidInput.

    Args:
        folder: the only one in which files may be written.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInput("a copy neither writes files nor reads from workers of the program")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in _CHANGES or (event == "open" and bool((arguments[2] or 0) & _WRITING))
        path = arguments[0] if is_change else None
        if isinstance(path, str | bytes | os.PathLike) and not _may_write(os.fsdecode(path), folder):
            refuse()

    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    iterator.__next__, iterator.__del__ = refuse, lambda _: None
    vars(torch)["save"] = refuse  # which opens files without Python
    sys.addaudithook(watch)


def _may_write(path: str, folder: Path) -> bool:
    return path.startswith((str(folder), "/dev/", "/proc/"))


def failure(path: Path) -> str:
    """How the copy that writes `path` failed; empty if it did not."""
    told = path.with_suffix(".failed")
    if told.exists():
        return told.read_text()
    return "" if path.exists() else f"it took more than {SECONDS} s, or ended without a word"


class Understudy(ABC):
    """A copy of this rank.

    Args:
        group: the rank's; from `begin` on, that of the copies, in the place of the same object.
        path: of what it writes.
        moves_parts: whether copies send each other parts of tensors, for which Gloo is needed.

    Attributes:
        samples: of a batch, at most.
        ends_with_pass: whether it ends when a loader has come to its end, before what a program does then.
        is_delayed: whether the program computes batches later than it loads them.
    """

    ends_with_pass = is_delayed = False

    def __init__(self, group: Group, path: Path, samples: int, moves_parts: bool = False) -> None:
        self.group, self.path, self.samples, self._moves_parts = group, path, samples, moves_parts
        self._kept: list[Any] = []

    def begin(self, env: RankEnvironment, token: str | None) -> None:
        """Meet the other copies under `token`, or be alone."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(SECONDS)
        end_with_parent()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        with self:
            self._regroup(env, token)

    @abstractmethod
    def sizes(self, count: int) -> Sequence[int]:
        """Samples for every copy of a batch of `count`."""

    def given(self, batch: Any, _part: BatchPart) -> Any:
        """A batch, of which this copy has a part, as the program is to have it."""
        return batch

    @abstractmethod
    def begin_step(self, owner: object, part: BatchPart) -> None:
        """The program trains on `part`, which `owner` gave, from now on."""

    @abstractmethod
    def next_batch(self) -> None:
        """The program goes on to another batch."""

    @abstractmethod
    def before_update(self) -> None:
        """The program is about to update weights."""

    @abstractmethod
    def end_step(self, owner: object) -> None:
        """`owner` goes on, or has come to its end: what was computed from its last batch is over."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write to `path` what came of it."""

    def end(self) -> NoReturn:
        """Write down what came of it, and end."""
        with self:
            part = self.path.with_suffix(".part")
            self.write(part)
            os.replace(part, self.path)
        os._exit(0)

    def __enter__(self) -> Self:
        """Inside, an error ends the copy."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Say why the program failed, and end."""
        with contextlib.suppress(OSError):
            sentence = first_line(error)
            if not isinstance(error, InvalidInput):
                sentence = f"{type(error).__name__}: {sentence}{place_of(error)}"
            atomic_write(self.path.with_suffix(".failed"), sentence.encode())
        os._exit(1)

    def _regroup(self, env: RankEnvironment, token: str | None) -> None:
        """What was the rank's group is that of the copies."""
        group = self.group
        # their threads are not here, neither to end them nor for collectives of the program's own, such as Lightning's
        self._kept += [group.process_group, group.mesh, group.reports, dist.GroupMember.WORLD]
        dist.GroupMember.WORLD = None
        group.process_group = group.reports = group.mesh = None
        group.timer.pace.speed = 1.0
        if token is None:
            group.rank, group.size, group.nodes = 0, 1, group.nodes[:1]
            return
        assert env.store is not None
        kept = env.store.inner
        store = connect_store(kept.host, kept.port, env.store.secret, patience=SECONDS)
        group.mesh = join_mesh(
            rank=group.rank,
            nodes=group.nodes,
            store=store.under(f"rehearsal/{token}"),
            address=env.address,
            patience=SECONDS,
            longest_wait=SECONDS,
        )
        if self._moves_parts:
            place = GlooPlace(
                store=store.under(f"rehearsal/{token}/gloo"), rank=group.rank, size=group.size, longest_wait=SECONDS
            )
            group.sums = AbortableGloo(place.join(), place)
            group.process_group = AbortableProcessGroup(group.rank, group.size, group.sums)
