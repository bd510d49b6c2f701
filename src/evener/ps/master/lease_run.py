"""A run whose nodes work on leases, and synchronize the weights with the master; its plan and record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from evener.agreements.messages import WorkerTotals
from evener.agreements.worker_record import WorkerRecord
from evener.oracle.apportion import NodeCost, apportion
from evener.ps.master.active_run import ActiveRun, result_of
from evener.ps.master.checkpointing import Checkpointer
from evener.ps.master.lease_training import LeaseTraining
from evener.ps.master.node_state import NodeEvent
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Send
from evener.ps.protocol.run_result import RunResult, encode_record, weights_of
from evener.ps.protocol.status import RunStatus
from evener.records.errors import EvenerError, Interrupted
from evener.records.events import Phase, RunEvent
from evener.records.history import History, NodeWork
from evener.records.plan import Assignment, Plan
from evener.records.record import NodeSummary, TrainRecord

_PLAN_SECONDS_PER_NODE = 0.1
"""Time between two plans, for each node in them, so that many joins do not fill the disk with long plans."""


class ActiveLeaseRun(ActiveRun):
    """A run whose nodes work on leases.

    Args:
        config: of the master.
        nodes: all nodes of the master.
        send: sends a message to a connection.
        training: the run itself: parameter server, validation, history.
        store: writes checkpoints of the run.

    Attributes:
        training: see above.
    """

    store: Checkpointer

    def __init__(
        self, config: MasterConfig, nodes: Nodes, send: Send, training: LeaseTraining, store: Checkpointer
    ) -> None:
        super().__init__(config, nodes, send, store)
        self.training = training
        self._num_shown_nodes = len(training.journal.history.totals)
        self._next_plan_at = 0.0

    @property
    def job(self) -> Job:
        """The job to do; its nodes change with `assign`."""
        return self.training.job

    @property
    def failure(self) -> EvenerError | None:
        """The error that ends the run; None if it can go on."""
        return self.training.failure

    @property
    def is_complete(self) -> bool:
        """Whether all samples are used and all epochs validated."""
        return self.training.server.is_over and not self.training.validation.due

    @property
    def status(self) -> RunStatus:
        """State of the run, for `evener nodes`."""
        history, validations = self.training.journal.history, self.training.journal.history.validations
        return RunStatus(
            run=self.name,
            task=self.job.title,
            method=self.job.agreement_name,
            version=self.training.server.version,
            epoch=history.epoch,
            epochs=self.job.workload.num_epochs,
            loss=history.loss,
            accuracy=validations[-1].accuracy if validations else None,
            folder=str(self.folder),
            submitter=self.job.submitter,
            nodes=self.job.nodes,
        )

    @property
    def held_bytes(self) -> int:
        """Memory that the run may take; see `LeaseTraining.held_bytes`."""
        return self.training.held_bytes

    @property
    def works(self) -> Mapping[str, NodeWork]:
        """Work of each node for the run, by name."""
        return self.training.journal.history.totals

    def assign(self, names: tuple[str, ...]) -> None:
        """Let only the nodes `names` work for the run; unfinished leases of other nodes are assigned again."""
        for node in self._nodes.by_name.values():
            if node.is_present and self.job.takes(node.name) and node.name not in names:
                self.training.reassign(node)
                self.dismiss(node)
        before = self.job
        self.training.job = replace(before, nodes=names)
        self.store.hurry()
        for node in self.present:
            if node.profile is not None and not before.takes(node.name):
                self.training.admit(node)

    def advance(self, is_delivering: Callable[[int], bool]) -> None:
        """Begin work, find stragglers, send the plan when a node has joined, and save checkpoints."""
        run = self.training
        run.begin(self.present)
        run.tick(is_delivering)
        now = self._config.clock()
        has_joined = len(run.journal.history.totals) != self._num_shown_nodes
        if has_joined and run.server.members and now >= self._next_plan_at:
            self._next_plan_at = now + _PLAN_SECONDS_PER_NODE * len(run.journal.history.totals)
            self._add_step()
            self._num_shown_nodes = len(run.journal.history.totals)
            run.journal.events += self._plan()
        if not self.is_over:
            self.store.save_if_due(run, self._nodes)

    def take_events(self) -> list[RunEvent]:
        """Return the events since the last call."""
        self._add_step()
        events = list(self.training.journal.events)
        self.training.journal.events.clear()
        return events

    def events_so_far(self) -> list[RunEvent]:
        """Return the epochs that have ended, how much is done, and the plan."""
        return [*self.training.journal.history.epochs, *self._plan()]

    def admit(self, node: NodeRecord) -> None:
        """Let a member prepare for the run or, if it is ready, work."""
        self.training.admit(node)

    def follow(self, kind: NodeEvent, reason: str, node: NodeRecord, *, is_lost: bool) -> None:
        """Record an event of a node; if the node is lost, others take over its work."""
        self.training.note(kind, f"node {node.name}: {reason}", node.name)
        if is_lost:
            self.training.reassign(node)

    def retire(self, node: NodeRecord) -> None:
        """Give a node no further work; it finishes its leases and slices."""
        self.training.retire(node)

    def is_free(self, node: NodeRecord) -> bool:
        """Return whether a node has no unanswered leases or slices."""
        return self.training.is_free(node)

    def reject(self, node: NodeRecord, reason: str, error: EvenerError | None = None) -> None:
        """Continue without a node that cannot take part, because of `error` if one was raised there."""
        self.training.not_ready(node, reason, error)
        self.training.reassign(node)

    def stop(self, *, at_once: bool) -> None:  # noqa: ARG002  # it never waits for nodes
        """End the run at the user's request, after the last update."""
        self.training.failure = Interrupted(f"stopped after update {self.training.server.version} as asked")

    def result(self, error: EvenerError | None) -> RunResult:
        """Return record and weights, if a node has worked for the run."""
        run = self.training
        if not run.journal.history.totals:
            return result_of(error, b"", b"")
        record = record_of(
            run.job,
            run.journal.history,
            self._nodes.by_name,
            run.speeds.costs,
            run.server.workers,
            seconds=run.seconds or 0.0,
            startup=run.waited if run.seconds is not None else 0.0,
            environment=self._config.environment,
        )
        return result_of(error, encode_record(record), weights_of(run.server.weights))

    def close(self) -> None:
        """Save a checkpoint; the nodes wait for the next master."""
        self.store.save(self.training, self._nodes)
        super().close()

    def _add_step(self) -> None:
        step = self.training.journal.history.news(self._num_shown_nodes)
        if step is not None and self._num_shown_nodes:
            self.training.journal.events.append(step)

    def _plan(self) -> Sequence[RunEvent]:
        """Return progress and plan; nothing before a node has worked."""
        history, workload = self.training.journal.history, self.job.workload
        if not history.names:
            return []
        total = round(workload.num_samples * self.job.agreement.fraction) * (workload.num_epochs or 0)
        done = min(total, sum(work.samples for work in history.totals.values()))
        phase = Phase(
            what="training",
            num_samples=total,
            done=done,
            epochs=workload.num_epochs or 0,
            options={"--agreement": self.job.agreement_name},
            task=self.job.title,
            file=self.job.task if self.job.task.endswith(".py") else "",
        )
        return [phase, plan_of(self.job, history.names, self._nodes.by_name, self.training.speeds.costs)]


def plan_of(job: Job, names: Sequence[str], nodes: Mapping[str, NodeRecord], costs: Mapping[str, NodeCost]) -> Plan:
    """Return the division of a batch among the nodes; absent `names` get no samples, unless all are absent."""
    timed, costs = costs, costs or dict.fromkeys(names, NodeCost(unit_seconds=1.0))
    present = [name for name in names if name in costs]
    sizes = dict(zip(present, apportion(job.agreement.batch, [costs[name] for name in present]), strict=True))
    return Plan(
        strategy="data",
        batch_size=job.agreement.batch,
        assignments=tuple(
            Assignment(
                rank=rank,
                node=name,
                device=nodes[name].device if name in nodes else "",
                samples=sizes.get(name, 0),
                sample_seconds=timed[name].unit_seconds if name in timed else 0.0,
                fixed_seconds=timed[name].fixed_seconds if name in timed else 0.0,
                reason=_reason(name, costs),
            )
            for rank, name in enumerate(names)
        ),
    )


def _reason(name: str, costs: Mapping[str, NodeCost]) -> str:
    if name not in costs:
        return "is not connected"
    fastest = min(cost.unit_seconds for cost in costs.values())
    return f"{fastest / costs[name].unit_seconds:.0%} of the fastest node's speed"


def record_of(
    job: Job,
    history: History,
    nodes: Mapping[str, NodeRecord],
    costs: Mapping[str, NodeCost],
    workers: Mapping[str, WorkerRecord],
    *,
    seconds: float,
    startup: float,
    environment: dict[str, str],
) -> TrainRecord:
    """Return the record of a run in which at least one node has taken part."""
    return history.record(
        [_summary(name, nodes.get(name), workers.get(name), history) for name in history.names],
        task=job.title,
        plan=plan_of(job, history.names, nodes, costs),
        seed=job.workload.seed,
        epochs=job.workload.num_epochs or 0,
        precision=job.precision,
        seconds=seconds,
        startup_seconds=startup,
        environment=environment,
        agreement=job.agreement_name,
    )


def _summary(name: str, node: NodeRecord | None, worker: WorkerRecord | None, history: History) -> NodeSummary:
    work, samples = history.totals[name], sum(work.samples for work in history.totals.values())
    totals = worker.totals if worker is not None else WorkerTotals()
    return NodeSummary(
        name=name,
        device=node.device if node else "",
        share=work.samples / samples if samples else 0.0,
        seconds_computing=work.busy_seconds,
        seconds_waiting=max(0.0, history.seconds - history.since[name] - work.busy_seconds),
        bytes_sent=work.sent,
        bytes_received=work.received,
        peak_memory_bytes=max(work.memory, node.peak_memory_bytes if node else 0),
        contributions=totals.applied,
        refused=totals.refused,
        late=totals.late,
        staleness=totals.staleness / totals.applied if totals.applied else 0.0,
        most_stale=totals.most_stale,
        clipped=totals.clipped,
    )
