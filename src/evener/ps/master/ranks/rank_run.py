"""A run whose ranks work together on the nodes, coordinated by the master."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from evener.ps.master.active_run import ActiveRun, result_of
from evener.ps.master.node_state import NodeEvent
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.ranks.rank_checkpoints import RankCheckpoints
from evener.ps.master.ranks.rank_journal import RankJournal
from evener.ps.master.ranks.rank_training import RankTraining
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import Send
from evener.ps.protocol.rank_messages import RankJob
from evener.ps.protocol.run_result import RunResult
from evener.ps.protocol.status import RunStatus
from evener.records.errors import EvenerError, Interrupted
from evener.records.events import RunEvent


class ActiveRankRun(ActiveRun):
    """A run whose ranks work together.

    Args:
        config: of the master.
        nodes: all nodes of the master.
        send: sends a message to a connection.
        job: job of the ranks.
        store: the journal of the run.

    Attributes:
        training: processes, generations, checkpoints.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send, job: RankJob, store: RankJournal) -> None:
        super().__init__(config, nodes, send, store)
        checkpoints = RankCheckpoints(config.home.blobs, send, store.add, config.notify)
        self.training = RankTraining(job, nodes, send, config.clock, store, checkpoints)

    @property
    def job(self) -> RankJob:
        """The job of the ranks."""
        return self.training.job

    @property
    def claim(self) -> RankJob:
        """The job, with the nodes that will take over, too."""
        return replace(self.job, nodes=self.training.claimed_nodes)

    @property
    def failure(self) -> EvenerError | None:
        """The error that ends the run; None if it can go on."""
        return self.training.failure

    @property
    def is_complete(self) -> bool:
        """Whether the ranks have made all steps."""
        return self.training.is_complete

    @property
    def status(self) -> RunStatus:
        """State of the run, for `evener nodes`."""
        news = self.training.news
        return RunStatus(
            run=self.name,
            task=self.job.title,
            method=f"strategy {news.plan.strategy}" if news.plan else "ranks that work together",
            version=self.training.num_updates,
            epoch=news.step.epoch if news.step else 0,
            epochs=(news.phase.epochs or None) if news.phase else None,
            loss=(news.step.loss or 0.0) if news.step else 0.0,
            accuracy=news.validation.accuracy if news.validation else None,
            folder=str(self.folder),
            submitter=self.job.submitter,
            nodes=self.job.nodes,
            checkpoint=self.training.checkpoints.last.step,
        )

    @property
    def held_bytes(self) -> int:
        """Memory of the resulting weights."""
        return self.training.held_bytes

    def assign(self, names: tuple[str, ...]) -> None:
        """Let only the nodes `names` work for the run, as soon as its ranks have stopped, from their last batch."""
        self.training.pause(names)
        self._go_on_if_paused()

    def advance(self, _: Callable[[int], bool]) -> None:
        """Do what is due: start processes, form the next generation, fetch checkpoints."""
        self.training.tick()
        self._go_on_if_paused()

    def _go_on_if_paused(self) -> None:
        """Let the nodes that are assigned to the run take over from those whose ranks have stopped."""
        if self.is_over or not self.training.has_paused:
            return
        for node in self._nodes.by_name.values():
            if self.job.takes(node.name):
                node.left_out_of.discard(self.name)
                self.dismiss(node)
        self.training.go_on()
        for node in self.present:
            if node.profile is not None:
                self.training.admit(node)

    def take_events(self) -> list[RunEvent]:
        """Return the events since the last call."""
        return self.training.news.take()

    def events_so_far(self) -> list[RunEvent]:
        """Return the epochs that have ended, the plan, and the phase that the run is in."""
        return self.training.news.so_far

    def admit(self, node: NodeRecord) -> None:
        """Let a member prepare for the run."""
        self.training.admit(node)

    def follow(self, kind: NodeEvent, reason: str, node: NodeRecord, *, is_lost: bool) -> None:
        """Record an event of a node; if the node is lost, the run may have to continue without its rank."""
        self.training.note(kind, f"node {node.name}: {reason}", node.name)
        if is_lost:
            self.training.lose(node, reason, is_silent=kind == "excluded")

    def retire(self, node: NodeRecord) -> None:
        """Let the node's rank go after a step."""
        self.training.retire(node)

    def is_free(self, node: NodeRecord) -> bool:
        """Return whether the node has no rank."""
        return self.training.is_free(node)

    def reject(self, node: NodeRecord, reason: str, error: EvenerError | None = None) -> None:
        """Continue without a node that cannot take part, because of `error` if one was raised there."""
        self.training.not_ready(node, reason, error)

    def disconnected(self, node: NodeRecord) -> None:
        """Forget the weights that were arriving over the node's connection."""
        self.training.disconnected(node)

    def stop(self, *, at_once: bool) -> None:
        """End the run at the user's request: the ranks end after their step, or at once."""
        self.training.stop(Interrupted("stopped as asked"), at_once=at_once)

    def result(self, error: EvenerError | None) -> RunResult:
        """End the processes; return the record and the weights, or else the weights of the last checkpoint."""
        run, note = self.training, ""
        run.close()
        weights: bytes | memoryview = run.weights
        if not weights and (weights := run.checkpoints.weights()):
            note = f"; the weights after step {run.checkpoints.last.step} were saved"
        record = msgspec.json.format(run.news.record, indent=1) if run.news.has_record else b""
        run.checkpoints.forget()
        return result_of(error, record, weights, note)

    def free(self) -> None:
        """Free what the run holds; its files stay, and its ranks wait for the next master."""
        self.training.checkpoints.close()
        self.training.news.forget_record()
        super().free()
