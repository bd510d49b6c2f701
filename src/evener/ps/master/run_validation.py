"""The validations of one run, joined to the nodes: slices go out, answers come in, and who lied is named."""

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
    """Of one run.

    Args:
        job: of the run.
        journal: of the run.
        speeds: of those who work.
        nodes: all that the master knows.
        send: to connections.
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
        """Those that have not been validated to their end."""
        return self._validations.due

    def begin(self, end: EpochEnd) -> None:
        """Have the weights that an epoch ended with validated."""
        if self._job.num_validation:
            self._validations.add(end)
            self.give_out()
        else:
            self._journal.epoch_ended(end.version, end.epoch)

    def give_out(self, *, also_of_the_late: bool = False) -> None:
        """Ask whoever works now for what nobody is asked for."""
        if self._validations.due:
            costs = self._speeds.validators
            self._send_slices(self._validations.give_out(costs, self._clock(), also_of_the_late=also_of_the_late))
            self._conclude(self._validations.finished(self._clock()))

    def remind(self, node: NodeRecord) -> None:
        """Ask a node again for what it has to answer."""
        self._send_slices(self._validations.slices_of(node.name))

    def answered(self, node: NodeRecord, header: Validated) -> tuple[bool, list[tuple[NodeRecord, str]]]:
        """A slice has been answered for: whether it was awaited, and who was found to lie, with what it said.

        Raises:
            BadFrame: the answer cannot be true.
        """
        if objection := self._validations.objection(node.name, header):
            raise BadFrame(objection)
        now = self._clock()
        is_news, validation = self._validations.answer(header, now)
        self._send_slices(self._validations.compare(node.name, header, list(self._speeds.validators)))
        liars = [(self._nodes.by_name[name], lie) for name, lie in self._validations.liars]
        self._validations.liars.clear()
        self._conclude(validation or self._validations.finished(now))
        return is_news, liars

    def _conclude(self, validation: Validation | None) -> None:
        """A validation has ended, if it has; the next one begins, if epochs are shorter than their validation."""
        if validation is not None:
            self._journal.validated(validation)
            self.give_out()

    def _send_slices(self, slices: Iterable[SliceForNode]) -> None:
        for name, header, weights in slices:
            node = self._nodes.by_name[name]
            node.steps_left += ceil(header.size / self._job.agreement.batch)
            self._send(node.peer, header, [weights])
