"""What a master writes down of a run in progress, so that killed and started again it goes on with it.

    run/server-VERSION.safetensors    weights, optimiser and samples, by `sync.snapshot`
    run/checkpoint.msgpack            everything else; names the file above, and is written after it

So a crash at any moment leaves a pair that belongs together. Another thread writes; who is asked again before it has
finished does not wait for it. It is done often enough to lose little, seldom enough to cost little.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from evener.atomic import atomic_write
from evener.errors import InvalidFile
from evener.history import History
from evener.ps.config import MasterConfig
from evener.ps.job import Job
from evener.ps.node_state import NodeState
from evener.ps.nodes import Nodes
from evener.ps.training_run import TrainingRun
from evener.schema import Part
from evener.sync.snapshot import Snapshot, load_snapshot, save_snapshot

_FILE = "checkpoint.msgpack"
_APART_SECONDS = 2.0
"""Between two checkpoints, at least."""
_MOST_COST = 0.05
"""Of the master's time, that taking checkpoints may cost."""


class RunCheckpoint(Part, frozen=True, kw_only=True):
    """Everything but the arrays.

    Attributes:
        server: name of the file with the arrays.
        job: of the run.
        history: what happened so far.
        used: samples of each epoch that has begun and not ended, that were learned from.
        due: epochs whose validation had not ended.
        begun: clock when work began, seconds since 1970; 0 if it had not.
        submitted: clock when the run was asked for.
        nodes: who took part, with times counted from the moment of writing.
    """

    server: str
    job: Job
    history: History
    used: dict[int, int]
    due: tuple[int, ...]
    begun: float
    submitted: float
    nodes: dict[str, NodeState]


class Checkpointer:
    """Writes down one run at a time; close it.

    Args:
        config: of the master.
    """

    def __init__(self, config: MasterConfig) -> None:
        self._folder, self._clock, self._notify = config.home.run, config.clock, config.notify
        self._writer = ThreadPoolExecutor(1, "evener-checkpointer")
        self._writing: Future[None] | None = None
        self._after, self._version = 0.0, -1

    def load(self) -> tuple[RunCheckpoint, Snapshot] | None:
        """The run that was in progress, if there was one.

        Raises:
            InvalidFile: what was written cannot be read.
        """
        path = self._folder / _FILE
        if not path.exists():
            return None
        try:
            checkpoint = msgspec.msgpack.decode(path.read_bytes(), type=RunCheckpoint)
        except (msgspec.DecodeError, OSError) as error:
            raise InvalidFile(f"cannot go on with the run in {path}: {error}; remove the file to leave it") from error
        return checkpoint, load_snapshot(self._folder / checkpoint.server)

    def save_if_due(self, run: TrainingRun, nodes: Nodes) -> None:
        """Begin to write down the run, if it has gone on and the time has come."""
        is_busy = self._writing is not None and not self._writing.done()
        if run.server.version != self._version and self._clock() >= self._after and not is_busy:
            self.save(run, nodes)

    def save(self, run: TrainingRun, nodes: Nodes) -> None:
        """Begin to write down the run; see `RunCheckpoint`."""
        now, version = self._clock(), run.server.version
        checkpoint = RunCheckpoint(
            server=f"server-{version}.safetensors",
            job=run.job,
            history=run.history,
            used=run.used,
            due=run.due,
            begun=run.begun,
            submitted=run.submitted,
            nodes=nodes.snapshot(now),
        )
        try:
            self._wait()
        except OSError as error:
            self._notify(f"warning: the run cannot be written down, a killed master would lose it: {error}")
        data = msgspec.msgpack.encode(checkpoint)
        self._writing = self._writer.submit(self._write, checkpoint.server, data, run.server.snapshot())
        self._version = version
        self._after = now + max(_APART_SECONDS, (self._clock() - now) / _MOST_COST)

    def forget(self) -> None:
        """The run is over."""
        with contextlib.suppress(OSError):  # it was not written, of which the user was told
            self._wait()
        (self._folder / _FILE).unlink(missing_ok=True)
        self._remove_but("")
        self._version, self._after = -1, 0.0

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._writer.shutdown()

    def _wait(self) -> None:
        """Raises OSError of the writing before this one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, name: str, data: bytes, snapshot: Snapshot) -> None:
        save_snapshot(snapshot, self._folder / name)
        atomic_write(self._folder / _FILE, data, private=True)
        self._remove_but(name)

    def _remove_but(self, name: str) -> None:
        for path in self._folder.glob("server-*.safetensors"):
            if path.name != name:
                path.unlink(missing_ok=True)
