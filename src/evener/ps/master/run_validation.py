"""The validations of one run and its nodes: sends slices, takes answers, and names faulty nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil
from random import SystemRandom

from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.run_journal import RunJournal
from evener.ps.master.run_speeds import RunSpeeds
from evener.ps.master.validation import EpochEnd, SliceForNode, Validations
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Send, Validated
from evener.records.record import Validation
from evener.wire.errors import BadFrame


class RunValidation:
    """The validations of one run.

    Args:
        job: job of the run.
        journal: journal of the run.
        speeds: speeds of the nodes at work.
        nodes: all nodes that the master knows.
        send: sends a message to a connection.
        clock: seconds.
    """

    def __init__(
        self,
        job: Job,
        journal: RunJournal,
        speeds: RunSpeeds,
        nodes: Nodes,
        send: Send,
        clock: Callable[[], float],
    ) -> None:
        self._job, self._journal, self._speeds = job, journal, speeds
        self._nodes, self._send, self._clock = nodes, send, clock
        self._validations = Validations(job, SystemRandom().randrange)

    @property
    def due(self) -> list[EpochEnd]:
        """Ends of epochs whose validation is not finished."""
        return self._validations.due

    def begin(self, end: EpochEnd) -> None:
        """Validate the weights at the end of an epoch."""
        if self._job.num_validation:
            self._validations.add(end)
            self.give_out()
        else:
            self._journal.epoch_ended(end.version, end.epoch)

    def give_out(self, *, reassign_late: bool = False) -> None:
        """Assign the slices that have no node to the nodes at work."""
        if self._validations.due:
            costs = self._speeds.validators
            self._send_slices(self._validations.give_out(costs, self._clock(), reassign_late=reassign_late))
            self._conclude(self._validations.finished(self._clock()))

    def remind(self, node: NodeRecord) -> None:
        """Send a node its open slices again."""
        self._send_slices(self._validations.slices_of(node.name))

    def answered(self, node: NodeRecord, header: Validated) -> tuple[bool, list[tuple[NodeRecord, str]]]:
        """Take the answer for a slice; return whether it was awaited, and faulty nodes with what they answered.

        Raises:
            BadFrame: the answer cannot be true.
        """
        if objection := self._validations.objection(node.name, header):
            raise BadFrame(objection)
        now = self._clock()
        is_news, validation = self._validations.answer(header, now)
        self._send_slices(self._validations.compare(node.name, header, list(self._speeds.validators)))
        faulty = [(self._nodes.by_name[name], reason) for name, reason in self._validations.faulty]
        self._validations.faulty.clear()
        self._conclude(validation or self._validations.finished(now))
        return is_news, faulty

    def _conclude(self, validation: Validation | None) -> None:
        """Add a validation that has ended; begin the next one, if epochs are shorter than their validation."""
        if validation is not None:
            self._journal.validated(validation)
            self.give_out()

    def _send_slices(self, slices: Iterable[SliceForNode]) -> None:
        for name, header, weights in slices:
            node = self._nodes.by_name[name]
            node.steps_left += ceil(header.size / self._job.agreement.batch)
            self._send(node.peer, header, [weights])
