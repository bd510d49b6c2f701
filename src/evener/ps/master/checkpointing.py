"""What a master writes down of each run in progress, so that killed and started again it goes on with it.

    run/server-RUN-NUMBER.safetensors    weights, also of epochs' ends, optimiser and samples: `sync.snapshot`
    run/checkpoint-RUN-NUMBER.msgpack    SHA-256 of the rest | SHA-256 of the file above | everything else

The second is written after the first, so a crash at any moment leaves a pair that belongs together. The last two pairs
are kept: if a disk has damaged the newer one, that is set aside by name and the older one is gone on from. Another
thread writes; who is asked again before it has finished does not wait for it. It is done often enough to lose little,
seldom enough to cost little; a disk that is full is a warning, and a pair is written when there is room again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from evener.ps.master.node_state import NodeState
from evener.ps.master.nodes import Nodes
from evener.ps.master.training_run import TrainingRun
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.job import Job
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidFile, InvalidInput
from evener.records.history import History
from evener.records.schema import NOT_DECODED, Part
from evener.sync.snapshot import Snapshot, load_snapshot, save_snapshot

_CHECKPOINT, _SERVER, _DIGITS = "checkpoint-{}-{}.msgpack", "server-{}-{}.safetensors", "[0-9]" * 8
_KEPT = 2
_APART_SECONDS = 2.0
"""Between two checkpoints, at least."""
_MOST_COST = 0.05
"""Of the master's time, that taking checkpoints may cost."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class RunCheckpoint(Part, frozen=True, kw_only=True):
    """Everything but the arrays.

    Attributes:
        server: name of the file with the arrays.
        job: of the run.
        history: what happened so far.
        used: samples of each epoch that has begun and not ended, that were learned from.
        due: epochs whose validation had not ended, with the versions of the weights that they ended with.
        seconds: since work began; None if it had not.
        waited: seconds from when the run was asked for until then, or until now.
        nodes: who took part, with times counted from the moment of writing.
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
    """Names of the runs that the last master of this home had in progress."""
    found = home.run.glob(_CHECKPOINT.format("*", _DIGITS))
    return sorted({path.stem.removeprefix("checkpoint-").rpartition("-")[0] for path in found})


class Checkpointer:
    """Writes down one run; close it.

    Args:
        config: of the master.
        run: its name.
    """

    def __init__(self, config: MasterConfig, run: str) -> None:
        self._home, self._folder, self._run = config.home, config.home.run, run
        self._clock, self._notify = config.clock, config.notify
        self._writer = ThreadPoolExecutor(1, "evener-checkpointer")
        self._writing: Future[None] | None = None
        self._after, self._version, self._number = 0.0, -1, 0
        self._is_failing = False

    def load(self) -> tuple[RunCheckpoint, Snapshot]:
        """The run as it was written down last.

        Raises:
            InvalidFile: nothing that was written down of it is whole.
        """
        for path in sorted(self._files(_CHECKPOINT), reverse=True):
            try:
                return _read(path)
            except InvalidInput as error:
                self._notify(f"warning: {error}; {self._home.set_aside([path])}")
        raise InvalidFile(f"no snapshot in {self._folder} is whole")

    def save_if_due(self, run: TrainingRun, nodes: Nodes) -> None:
        """Begin to write down the run, if it has gone on and the time has come."""
        is_busy = self._writing is not None and not self._writing.done()
        if run.server.version != self._version and self._clock() >= self._after and not is_busy:
            self.save(run, nodes)

    def save(self, run: TrainingRun, nodes: Nodes) -> None:
        """Begin to write down the run; see `RunCheckpoint`."""
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
        self._after = now + max(_APART_SECONDS, (self._clock() - now) / _MOST_COST)

    def hurry(self) -> None:
        """What was written down is not how the run stands, though its weights may be the same."""
        self._version, self._after = -1, 0.0

    def forget(self) -> None:
        """The run is over."""
        self._wait()
        self._remove_before(self._number + 1)

    def set_aside(self) -> str:
        """Keep what is written down of the run apart, so that no other run comes upon it; where it is, in words."""
        self._wait()
        return self._home.set_aside([*self._files(_CHECKPOINT), *self._files(_SERVER)])

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._wait()
        self._writer.shutdown()

    def _wait(self) -> None:
        """Until nothing is being written; tell the user when that begins to fail, and when it works again."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            if not self._is_failing:
                self._notify(
                    f"warning: the run cannot be written down ({error.strerror or error}); what was written before is "
                    "kept, and it is tried again and again"
                )
            self._is_failing = True
        else:
            if self._is_failing:
                self._notify("the run is written down again")
            self._is_failing = False

    def _write(self, number: int, data: bytes, snapshot: Snapshot) -> None:
        rest = save_snapshot(snapshot, self._folder / _SERVER.format(self._run, f"{number:08}")) + data
        path = self._folder / _CHECKPOINT.format(self._run, f"{number:08}")
        atomic_write(path, hashlib.sha256(rest).digest() + rest, private=True)
        self._remove_before(number + 1 - _KEPT)

    def _remove_before(self, number: int) -> None:
        for path in (*self._files(_CHECKPOINT), *self._files(_SERVER)):
            if _number_of(path) < number:
                path.unlink(missing_ok=True)

    def _files(self, kind: str) -> Iterator[Path]:
        return self._folder.glob(kind.format(self._run, _DIGITS))


def _arrays_of(run: TrainingRun) -> Snapshot:
    return replace(run.server.snapshot(), ends={end.epoch: end.weights for end in run.validation.due})


def _read(path: Path) -> tuple[RunCheckpoint, Snapshot]:
    """What was written down. Raises InvalidInput: it is not whole."""
    try:
        content = path.read_bytes()
        digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(rest).digest() != digest:
            raise InvalidFile(f"{path} is damaged: its checksum is wrong")
        checkpoint = msgspec.msgpack.decode(rest[_DIGEST_BYTES:], type=RunCheckpoint)
    except (*NOT_DECODED, OSError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    return checkpoint, load_snapshot(path.with_name(checkpoint.server), rest[:_DIGEST_BYTES])


def _number_of(path: Path) -> int:
    """In the name of a file; 0 if there is none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
