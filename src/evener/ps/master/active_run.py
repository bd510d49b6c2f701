"""A run in progress: its conduct, those who watch it, and what is written down of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from evener.ps.master.checkpointing import Checkpointer
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.results import record_of
from evener.ps.master.subscribers import Subscribers, open_log
from evener.ps.master.training_run import TrainingRun
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import Release, RunFinished, Send
from evener.ps.protocol.run_result import RunResult, encode_record, save_result, weights_of
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError
from evener.records.schema import shown


class ActiveRun:
    """See the first line.

    Args:
        config: of the master.
        nodes: all of them.
        send: to connections.
        training: its conduct.
        checkpointer: writes it down.

    Attributes:
        training: see above.
        checkpointer: see above.
        subscribers: those who watch it.
    """

    def __init__(
        self, config: MasterConfig, nodes: Nodes, send: Send, training: TrainingRun, checkpointer: Checkpointer
    ) -> None:
        self._config, self._nodes, self._send = config, nodes, send
        self.training, self.checkpointer = training, checkpointer
        self.subscribers = Subscribers(nodes, send)

    @property
    def present(self) -> list[NodeRecord]:
        """Nodes that are here for it."""
        return [node for node in self._nodes.present if self.training.job.takes(node.name)]

    def begin(self, watchers: Sequence[int]) -> None:
        """Have it watched, and kept in its log, from now on."""
        log = open_log(self._config, self.training.job.run)
        self.subscribers.begin(watchers, len(self.training.journal.history.totals), log)

    def assign(self, names: tuple[str, ...]) -> None:
        """Have these nodes work for it, and no others; what others had begun is done again."""
        for node in self.present:
            if node.name not in names:
                self.training.lose(node)
                self._release(node)
        before = self.training.job
        self.training.job = replace(before, nodes=names)
        self.checkpointer.hurry()
        for node in self.present:
            if node.profile is not None and not before.takes(node.name):
                self.training.admit(node)

    def tick(self, now: float, is_delivering: Callable[[int], bool]) -> bool:
        """What the time brings: events for subscribers, the late; whether the run is over."""
        self.training.begin(self.present)
        self.training.tick(is_delivering)
        self.subscribers.tick(self.training, now)
        is_complete = self.training.server.is_over and not self.training.validation.due
        is_over = self.training.failure is not None or is_complete
        if not is_over:
            self.checkpointer.save_if_due(self.training, self._nodes)
        return is_over

    def conclude(self, error: EvenerError | None) -> tuple[RunFinished, RunResult, str]:
        """How it ended, what it has come to, and where that is kept, in words."""
        run = self.training
        self.subscribers.flush(run)
        reason = shown(str(error)) if error else ""
        header = RunFinished(kind=kind_of(error) if error else None, reason=reason, run=run.job.run)
        result = RunResult(header.kind, header.reason, b"", b"")
        if run.journal.history.totals:
            result = result._replace(record=self._record(), weights=weights_of(run.server.weights))
        return header, result, self._keep(result)

    def release(self, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """Nobody works for it, or watches it, any more."""
        run = self.training.job.run
        self.subscribers.end(header, buffers)
        self._nodes.forget_rounds(run)
        for node in self._nodes.by_name.values():
            node.not_ready.discard(run)
            if self.training.job.takes(node.name):
                self._release(node)

    def close(self) -> None:
        """Write it down as it stands; its nodes look out for a master that comes back."""
        self.checkpointer.save(self.training, self._nodes)
        self.subscribers.close()
        self.checkpointer.close()

    @property
    def _folder(self) -> Path:
        return self._config.home.runs / self.training.job.run

    def _keep(self, result: RunResult) -> str:
        try:
            if result.record:
                save_result(self._folder, result)
        except OSError as error:
            return f"its results cannot be written ({error.strerror}); {self.checkpointer.set_aside()}"
        self.checkpointer.forget()
        return f"results are in {self._folder}" if result.record else "nobody worked for it"

    def _record(self) -> bytes:
        """What is written down of a run in which somebody had a part."""
        run = self.training
        return encode_record(
            record_of(
                run.job,
                run.journal.history,
                self._nodes.by_name,
                run.speeds.costs,
                run.server.workers,
                seconds=run.seconds or 0.0,
                startup=run.waited if run.seconds is not None else 0.0,
                environment=self._config.environment,
            )
        )

    def _release(self, node: NodeRecord) -> None:
        node.ready, node.doing, node.worker = "", "waits", None
        self._send(node.peer, Release(run=self.training.job.run))
