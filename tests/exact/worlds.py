"""Ranks as processes that are kept for many cases: a case costs milliseconds, and one that hangs costs its world."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import evener
from evener.comm.group import Group
from evener.comm.joining import join_group
from evener.comm.signed_store import SignedStore
from evener.parallel.pipeline.pipeline import Pipeline
from evener.records.errors import EvenerError, NodeLost
from exact.divisions import WAYS
from exact.plants import planted
from exact.recipe import recipe_of
from exact.runs import prepared, run_divided, run_whole

MOST_CASES = 200
"""Of one world: the groups of finished cases are never closed."""
GRACE = 1.0


class Job(msgspec.Struct, frozen=True):
    """What all ranks of a world are to run.

    Attributes:
        recipe: by name.
        way: by name; empty for the whole, which one process runs.
        across: whether the model looks across samples.
        is_checked: whether the ranks hold a small step against one process first, as a run does.
        plant: a defect, by name, that the ranks have; empty for none.
    """

    recipe: str
    way: str = ""
    across: bool = False
    is_checked: bool = True
    plant: str = ""


class Reply(msgspec.Struct, frozen=True):
    """What a rank has to say of a job.

    Attributes:
        outcome: of its part.
        error: class of what was raised.
        sentence: what that said.
        place: the last line of ours that it passed.
        refused: whether it is an error that is meant for the user, and came before the first step.
        lost: whether it only says that another rank is gone.
    """

    outcome: bytes = b""
    error: str = ""
    sentence: str = ""
    place: str = ""
    refused: bool = False
    lost: bool = False


class Hang(Exception):
    """No rank had anything to say for too long."""


@dataclass
class _World:
    store: Any
    pids: list[int] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    cases: int = 0

    def close(self) -> None:
        for pid, pipe in zip(self.pids, self.pipes, strict=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pipe.close()


class _Nursery:
    """Makes ranks; one serves all worlds of this process, and ends with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(str(Path(self._folder.name) / "ranks"))
        address = str(self._listener.address)
        self._process = subprocess.Popen([sys.executable, "-m", "exact.nursery", address], env=_environment())
        self._line = self._listener.accept()
        atexit.register(self.close)

    def rank(self, rank: int, size: int, port: int) -> tuple[int, Connection]:
        """The number of a new process, and the line to it."""
        self._line.send_bytes(msgspec.json.encode((rank, size, port)))
        pipe: Any = self._listener.accept()
        return int(pipe.recv_bytes()), pipe

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.close()
        self._folder.cleanup()


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def _environment() -> dict[str, str]:
    """That of this process, with all folders that it imports from."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


class Worlds:
    """Worlds of any size, made when they are needed.

    Args:
        limit: seconds that a case may take.
    """

    def __init__(self, limit: float = 40.0) -> None:
        self._worlds: dict[int, _World] = {}
        self._limit = limit

    def run(self, job: Job) -> list[Reply]:
        """What every rank replies; after an error only of those that had one. Raises Hang."""
        size = WAYS[job.way].size if job.way else 1
        world = self._worlds.get(size) or self._start(size)
        for pipe in world.pipes:
            pipe.send_bytes(msgspec.json.encode(job))
        try:
            replies = self._collect(world)
        except Hang:
            self._close(size)
            raise
        world.cases += 1
        if not _goes_on(replies, size) or world.cases >= MOST_CASES:
            self._close(size)
        return replies

    def _collect(self, world: _World) -> list[Reply]:
        found: dict[int, Reply] = {}
        deadline = time.monotonic() + self._limit
        while len(found) < len(world.pipes):
            ready = wait([p for i, p in enumerate(world.pipes) if i not in found], max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                i = world.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[i] = msgspec.msgpack.decode(world.pipes[i].recv_bytes(), type=Reply)
                except (EOFError, OSError):
                    found[i] = Reply(error="Ended", sentence="the process ended")
            if any(reply.error for reply in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(found) < len(world.pipes) and not any(reply.error for reply in found.values()):
            raise Hang
        return [found[i] for i in sorted(found)]

    def _start(self, size: int) -> _World:
        world = _World(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))  # type: ignore[attr-defined]
        for rank in range(size):
            pid, pipe = _nursery().rank(rank, size, world.store.port)
            world.pids.append(pid)
            world.pipes.append(pipe)
        self._worlds[size] = world
        return world

    def _close(self, size: int) -> None:
        self._worlds.pop(size).close()

    def close(self) -> None:
        for size in list(self._worlds):
            self._close(size)


def _goes_on(replies: list[Reply], size: int) -> bool:
    """Whether the ranks are where they were before: none has failed, or all were refused by the same sentence."""
    sentences = {(reply.error, reply.sentence) for reply in replies}
    is_refused = all(reply.refused for reply in replies) and len(replies) == size and len(sentences) == 1
    return is_refused or not any(reply.error for reply in replies)


@contextmanager
def worlds(limit: float = 40.0) -> Iterator[Worlds]:
    made = Worlds(limit)
    try:
        yield made
    finally:
        made.close()


def serve(rank: int, size: int, port: int, pipe: Any) -> None:
    """One rank: jobs come, replies go."""
    torch.set_num_threads(1)
    defaults: Any = Pipeline.__init__.__kwdefaults__
    defaults["costs"] = "estimated"  # else the cuts differ from run to run
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    group = join_group(
        rank=rank,
        nodes=[f"node-{i}" for i in range(size)],
        device=torch.device("cpu"),
        store=SignedStore(store, b"0" * 16),
        patience=30,
        longest_wait=300,
    )
    while True:
        job = msgspec.json.decode(pipe.recv_bytes(), type=Job)
        with planted(job.plant):
            reply = _reply(job, group)
        pipe.send_bytes(msgspec.msgpack.encode(reply))


def _reply(job: Job, group: Group) -> Reply:
    has_begun = False
    try:
        recipe = recipe_of(job.recipe)
        training = prepared(job.recipe, WAYS[job.way], group, job.across, job.is_checked) if job.way else None
        has_begun = True
        outcome = run_divided(recipe, training) if training is not None else run_whole(recipe)
        if not group.is_leader:
            outcome.weights = {}
        return Reply(outcome=outcome.to_bytes())
    except Exception as error:
        return _failure(error, has_begun)


def _failure(error: Exception, has_begun: bool) -> Reply:
    frames = traceback.extract_tb(error.__traceback__)
    folder = str(Path(evener.__file__).parent)
    ours = [frame for frame in frames if frame.filename.startswith(folder)]
    place = f"{ours[-1].filename[len(folder) + 1 :]}:{ours[-1].name}:{ours[-1].lineno}" if ours else ""
    last = frames[-1]
    if not ours or last is not ours[-1]:
        place += f" > {Path(last.filename).name}:{last.name}:{last.lineno}"
    sentence = str(error).strip().replace("\n", " | ")[:300]
    is_lost = isinstance(error, NodeLost) or "onnection closed" in sentence or "onnection reset" in sentence
    refused = isinstance(error, EvenerError) and not is_lost and not has_begun
    return Reply(error=type(error).__name__, sentence=sentence, place=place, refused=refused, lost=is_lost)
