"""The loop of a rank in a run that survives lost nodes: the same loop, in generations.

while steps are left:
    enter the next generation            new connections among the present ranks; a state that all agree upon
    train with new shares                from the step after it: the same samples as one process; a lone replica of a
                                         divided model makes the steps since its last copies again
        a rank is lost                   every wait for another rank raises
        a rank joins                     the step is finished first

Ranks agree on a state in `replicated` if each has all of it, and in `divided` if each has a part.

The loss itself is noticed elsewhere: `launch.ranks`, or a master's `rank_training`, sees it by
`membership.rank_supervisor`, whose `coordinator` announces the next generation; `membership.elastic_group` then aborts
the connections of this rank. docs/journey.md follows a loss from end to end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Generation
from evener.records.errors import NodeLost
from evener.records.plan import Plan
from evener.training.elastic.loss_events import tell_generation
from evener.training.loop import Loop
from evener.training.session import TrainingSession
from evener.training.training import Training

NO_STEP = -1
"""The last step of a rank that has no state yet."""


class ElasticLoop(ABC):
    """One rank's loop through the generations of a run.

    Args:
        group: the ranks of the first generation.
        plan: the first plan of the run.
        config: of the run.
        membership: of this rank among those that change.
    """

    def __init__(self, group: Group, plan: Plan, config: RunConfig, membership: ElasticGroup) -> None:
        self._group, self._plan, self._config, self._membership = group, plan, config, membership
        self._loop: Loop | None = None
        self._was_ended = False  # by a callback
        self._settled = NO_STEP  # the last step that was also validated and saved
        self._first, self._begin, self._mark = 1, 0.0, 0.0

    def run(self, finish: Callable[[Training, TrainingSession, RunConfig], None]) -> None:
        """Perform all steps, then call `finish`, on all ranks of the last generation.

        Raises:
            NodeLost: the remaining ranks do not hold the state, or the coordinator knows of no lost rank.
            DoesNotFit: the remaining ranks cannot hold the model; a checkpoint of the whole is written.
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        self._membership.start(tuple(self._group.nodes) if self._begin_run() else ())
        self._begin = self._mark = time.perf_counter()
        with ExitStack() as writing:
            is_writing = is_over = False
            while not is_over:
                try:
                    loop, training = self._enter()
                    if not is_writing:
                        writing.enter_context(loop.saving.writing())
                        is_writing = True
                    is_over = self._train(loop, training)
                    if is_over:
                        self._finish(loop, training, finish)
                except (RuntimeError, NodeLost) as error:
                    is_over = False
                    self._membership.require_broken(error)

    @abstractmethod
    def _begin_run(self) -> bool:
        """Begin, or resume from a checkpoint, on an initial rank; return whether this is one."""

    @abstractmethod
    def _enter(self) -> tuple[Loop, Training]:
        """Enter the next generation, with the state that its ranks agree upon."""

    @abstractmethod
    def _before_step(self, step: int) -> None:
        """Save the state that `step` changes before all ranks have completed it."""

    @abstractmethod
    def _after_step(self, loop: Loop) -> None:
        """Serve the other ranks after a step that all have made."""

    @property
    def _has_state(self) -> bool:
        """Whether this rank has the state of the training."""
        return True

    @property
    def _is_settled(self) -> bool:
        return self._loop is not None and self._settled == self._loop.last

    def _start(self, loop: Loop) -> None:
        self._first = loop.start()
        self._settled = loop.last

    def _tell(self, generation: Generation, loop: Loop, training: Training, repeated: int = 0) -> None:
        """Record why the generation began, and how much time it cost."""
        self._mark = tell_generation(
            generation,
            self._membership,
            loop.monitor,
            training.group,
            self._mark,
            len(self._plan.assignments),
            loop.last,
            repeated,
        )
        self._membership.has_told()
        if self._has_state:
            self._membership.has_state()

    def _train(self, loop: Loop, training: Training) -> bool:
        """Perform steps; return whether the run is over, or False if the ranks change first."""
        loader = loop.loader(loop.last + 1)
        loop.session.start(loop.last + 1)
        if not self._is_settled:
            self._settle(loop)
        while loop.last < training.num_steps and not self._was_ended and not loop.monitor.is_regrouping:
            self._before_step(loop.last + 1)
            self._membership.at_step(loop.last + 1)
            loop.one_step(loop.last + 1, loader)
            self._settle(loop)
            self._after_step(loop)
        loop.monitor.settle()
        return self._was_ended or loop.last == training.num_steps

    def _settle(self, loop: Loop) -> None:
        """Validate and save after the last step; repeat this if a rank was lost meanwhile."""
        history = loop.monitor.history
        history.validations = [one for one in history.validations if one.step != loop.last]
        self._was_ended = loop.after_step(loop.last)
        self._settled, self._mark = loop.last, time.perf_counter()

    def _finish(
        self, loop: Loop, training: Training, finish: Callable[[Training, TrainingSession, RunConfig], None]
    ) -> None:
        loop.saving.settle()  # the record tells of them
        loop.session.plan = self._plan
        loop.session.history.wall_seconds = time.perf_counter() - self._begin
        finish(training, loop.session, self._config)
        training.group.barrier()
