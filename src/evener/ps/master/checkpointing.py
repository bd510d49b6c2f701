"""Checkpoints of the runs in progress, from which a restarted master continues them.

    run/server-RUN-NUMBER.safetensors    weights, also of epochs' ends, optimiser and samples: `agreements.snapshot`
    run/checkpoint-RUN-NUMBER.msgpack    SHA-256 of the rest | SHA-256 of the file above | everything else

The second file is written after the first, so a crash at any moment leaves a matching pair. Two pairs are kept:
if the newer one is damaged, it is moved away and the run continues from the older one. A thread writes the files, and
no new checkpoint begins before it has finished. The interval limits both the lost work and the cost. A full disk is a
warning; the next pair is written when there is room again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from evener.agreements.snapshot import Snapshot, load_snapshot, save_snapshot
from evener.ps.master.lease_training import LeaseTraining
from evener.ps.master.node_state import NodeState
from evener.ps.master.nodes import Nodes
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.job import Job
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile, InvalidInput
from evener.records.history import History
from evener.records.schema import NOT_DECODED, Part

_CHECKPOINT, _SERVER, _DIGITS = "checkpoint-{}-{}.msgpack", "server-{}-{}.safetensors", "[0-9]" * 8
_NUM_PAIRS = 2
_MIN_INTERVAL_S = 2.0
"""Shortest time between two checkpoints."""
_MAX_COST = 0.05
"""Largest share of the master's time for taking checkpoints."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class RunCheckpoint(Part, frozen=True, kw_only=True):
    """Everything but the arrays.

    Attributes:
        server: name of the file with the arrays.
        job: job of the run.
        history: history of the run so far.
        used: samples that were learned from, of each unfinished epoch.
        due: epochs whose validation is not finished, with the versions of the weights at their ends.
        seconds: seconds since work began; None if it had not begun.
        waited: seconds from the submission until work began, or until now.
        nodes: nodes that took part, with times relative to the moment of writing.
    """

    server: str
    job: Job
    history: History
    used: dict[int, int]
    due: dict[int, int]
    seconds: float | None
    waited: float
    nodes: dict[str, NodeState]


def unfinished(home: StateDir) -> list[str]:
    """Return the names of the runs that the last master of this state folder had in progress."""
    files = home.run.glob(_CHECKPOINT.format("*", _DIGITS))
    return sorted({path.stem.removeprefix("checkpoint-").rpartition("-")[0] for path in files})


class Checkpointer:
    """Saves one run; close it.

    Args:
        config: configuration of the master.
        run: name of the run.
    """

    def __init__(self, config: MasterConfig, run: str) -> None:
        self._home, self._folder, self._run = config.home, config.home.run, run
        self._clock, self._notify = config.clock, config.notify
        self._writer = ThreadPoolExecutor(1, "evener-checkpointer")
        self._writing: Future[None] | None = None
        self._after, self._version, self._number = 0.0, -1, 0
        self._is_failing = False

    def load(self) -> tuple[RunCheckpoint, Snapshot]:
        """Load the last checkpoint of the run.

        Raises:
            InvalidFile: no checkpoint of it is complete.
        """
        for path in sorted(self._files(_CHECKPOINT), reverse=True):
            try:
                return _read(path)
            except InvalidInput as error:
                self._notify(f"warning: {error}; {self._home.set_aside([path])}")
        raise InvalidFile(f"there is no complete checkpoint in {self._folder}")

    def save_if_due(self, run: LeaseTraining, nodes: Nodes) -> None:
        """Begin to save the run if it has made progress and a checkpoint is due."""
        is_busy = self._writing is not None and not self._writing.done()
        if run.server.version != self._version and self._clock() >= self._after and not is_busy:
            self.save(run, nodes)

    def save(self, run: LeaseTraining, nodes: Nodes) -> None:
        """Begin to save the run; see `RunCheckpoint`."""
        now, version = self._clock(), run.server.version
        self._wait()
        self._number = 1 + max(self._number, *map(_number_of, self._files(_CHECKPOINT)), 0)
        checkpoint = RunCheckpoint(
            server=_SERVER.format(self._run, f"{self._number:08}"),
            job=run.job,
            history=run.journal.history,
            used=run.used,
            due={end.epoch: end.version for end in run.validation.due},
            seconds=run.seconds,
            waited=run.waited,
            nodes=nodes.snapshot(now),
        )
        data = msgspec.msgpack.encode(checkpoint)
        self._writing = self._writer.submit(self._write, self._number, data, _arrays_of(run))
        self._version = version
        self._after = now + max(_MIN_INTERVAL_S, (self._clock() - now) / _MAX_COST)

    def hurry(self) -> None:
        """Make a checkpoint due at once, though the weights may not have changed."""
        self._version, self._after = -1, 0.0

    def forget(self) -> None:
        """Remove the checkpoints: the run is over."""
        self._wait()
        self._remove_before(self._number + 1)

    def set_aside(self) -> str:
        """Move the checkpoints to where no other run finds them; return a clause that names the place."""
        self._wait()
        return self._home.set_aside([*self._files(_CHECKPOINT), *self._files(_SERVER)])

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._wait()
        self._writer.shutdown()

    def _wait(self) -> None:
        """Wait until nothing is being written; notify the user when writing begins to fail, and when it works again."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            if not self._is_failing:
                self._notify(
                    f"warning: cannot save a checkpoint of the run ({error.strerror or error}); "
                    "earlier checkpoints remain, and saving is tried again"
                )
            self._is_failing = True
        else:
            if self._is_failing:
                self._notify("checkpoints of the run are saved again")
            self._is_failing = False

    def _write(self, number: int, data: bytes, snapshot: Snapshot) -> None:
        rest = save_snapshot(snapshot, self._folder / _SERVER.format(self._run, f"{number:08}")) + data
        path = self._folder / _CHECKPOINT.format(self._run, f"{number:08}")
        atomic_write(path, hashlib.sha256(rest).digest() + rest, private=True)
        self._remove_before(number + 1 - _NUM_PAIRS)

    def _remove_before(self, number: int) -> None:
        for path in (*self._files(_CHECKPOINT), *self._files(_SERVER)):
            if _number_of(path) < number:
                path.unlink(missing_ok=True)

    def _files(self, kind: str) -> Iterator[Path]:
        return self._folder.glob(kind.format(self._run, _DIGITS))


def _arrays_of(run: LeaseTraining) -> Snapshot:
    return replace(run.server.snapshot(), ends={end.epoch: end.weights for end in run.validation.due})


def _read(path: Path) -> tuple[RunCheckpoint, Snapshot]:
    """Read a checkpoint. Raises InvalidInput: it is not complete."""
    try:
        content = path.read_bytes()
        digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(rest).digest() != digest:
            raise InvalidFile(f"{path} is damaged: its checksum is wrong")
        checkpoint = decode_msgpack(rest[_DIGEST_BYTES:], RunCheckpoint)
    except (*NOT_DECODED, OSError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    return checkpoint, load_snapshot(path.with_name(checkpoint.server), rest[:_DIGEST_BYTES])


def _number_of(path: Path) -> int:
    """Return the number in the name of a file; 0 if there is none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
