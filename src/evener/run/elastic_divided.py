"""The loop of a rank whose model is divided, and whose run goes on when others are gone: in generations, too.

while steps are left:
    enter the next generation            new connections among the ranks that are there
    put the state together               the newest whole one that their parts make; everybody gets it
    take a part of it                    by a plan for those who are there
    train                                all have their gradients? only then does anybody change weights
        somebody is gone                 every wait for another rank raises
        somebody has come                the step is finished first
    copy parts every k steps             where no other replica has them

Where there are several replicas, a step is made by all or by none: whoever is interrupted after all had their gradients
makes the update before it goes on, so no step is lost. Where there is one, all go back to the step of the last copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from evener.elastic.agreement import Standing
from evener.elastic.elastic_group import ElasticGroup
from evener.elastic.generation import Generation
from evener.errors import DoesNotFit, InvalidInput, NodeLost
from evener.history import History
from evener.oracle.copies import FAULT_SECONDS
from evener.parallel.gradient_hooks import copied
from evener.plan import Plan
from evener.record import Event
from evener.run.checkpoint import Checkpoints
from evener.run.config import RunConfig
from evener.run.context import RankContext
from evener.run.divided_state import DividedState
from evener.run.elastic_plan import plan_among
from evener.run.elastic_telling import add_untold, tell_generation
from evener.run.held_state import HeldState
from evener.run.loop import Loop
from evener.run.training import Training, make_training

_NONE = -1
"""The last step of a rank that has no state yet."""


class DividedElasticLoop:
    """One rank's loop through the generations of a run.

    Args:
        context: of this rank, whose model is whole, and is copied for every generation.
        plan: with which the run began.
        config: of the run.
        ranks: that change.
        training: of a founder, before the first generation; None for a rank that comes later.
    """

    def __init__(
        self, context: RankContext, plan: Plan, config: RunConfig, ranks: ElasticGroup, training: Training | None
    ) -> None:
        self._context, self._plan, self._config, self._ranks = context, plan, config, ranks
        self._group, self._training = context.group, training
        self._state = DividedState(self._group)
        self._loop = None if training is None else self._new_loop(training)
        self._is_ready = False  # whether all gradients of the step under way are complete here
        self._was_ended = self._is_writing = False
        self._settled = _NONE  # the last step after which all is done
        self._first, self._begin, self._mark = 1, 0.0, 0.0

    def run(self, finish: Callable[[Training, History], None]) -> None:
        """All steps to the last, and `finish`, which all ranks of the last generation call.

        Raises:
            NodeLost: those who are left do not hold all parts of the state.
            DoesNotFit: nor do they hold the model; a checkpoint of the whole is written.
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        if self._loop is not None and self._training is not None:
            self._first = self._loop.start()
            self._settled = self._loop.last
            self._state.live_in(self._training)
        self._ranks.start(() if self._loop is None else tuple(self._group.nodes))
        self._begin = self._mark = time.perf_counter()
        with ExitStack() as writing:
            is_over = False
            while not is_over:
                try:
                    loop, training = self._enter(writing)
                    is_over = self._train(loop, training)
                    if is_over:
                        self._finish(loop, training, finish)
                except (RuntimeError, NodeLost) as error:
                    is_over = False
                    self._ranks.require_broken(error)

    def _new_loop(self, training: Training) -> Loop:
        return Loop(training, self._config, self._before_update, lambda: self._ranks.is_followed)

    def _before_update(self) -> None:
        """Return when all ranks have their gradients of this step, where others hold what a lost one held."""
        self._ranks.fence()
        if self._training is not None and len(self._training.plan.replica_ranks) > 1:
            self._is_ready = True
            self._group.barrier()

    def _enter(self, writing: ExitStack) -> tuple[Loop, Training]:
        """Be a rank of the next generation, with this rank's part of the state that its ranks put together."""
        while True:
            generation = self._ranks.enter()
            before = self._complete_step()
            wall = 0.0 if self._loop is None else time.perf_counter() - self._begin
            whole = self._state.put_together(self._loop, wall, is_settled=self._is_settled)
            self._begin = time.perf_counter() - whole.history.wall_seconds
            training = self._built(generation, whole)
            if training is not None:
                break
        loop = self._resumed(training, whole, writing)
        self._mark = tell_generation(
            self._ranks.what_began(), self._ranks, loop.monitor, self._group, self._mark,
            len(self._plan.assignments), loop.last, max(0, before - loop.last),
        )  # fmt: skip
        self._ranks.has_state()
        if (heartbeat := self._context.env.heartbeat) is not None:
            heartbeat.stop()  # from now on it is the authority that listens
        self._begin_copies(loop)
        return loop, training

    @property
    def _is_settled(self) -> bool:
        return self._loop is not None and self._settled == self._loop.last

    def _complete_step(self) -> int:
        """Make the step that others have made, or undo what there is of it; the last step that anybody has made."""
        loop, last = self._loop, _NONE if self._loop is None else self._loop.last
        rows = self._group.all_gather_bytes(msgspec.json.encode(Standing(step=last)))
        newest = max(msgspec.json.decode(row, type=Standing).step for row in rows)
        if loop is not None:
            if self._is_ready and last == newest - 1:
                loop.finish_step(newest)
            else:
                self._state.undo(last + 1)
            self._is_ready = False
            if self._training is not None:
                add_untold(loop.monitor.history, self._training.sampler, self._first, loop.last)
        return newest

    def _built(self, generation: Generation, whole: HeldState) -> Training | None:
        """This rank's part of `whole` by a plan for `generation`; None if none fits, and others come soon."""
        context = replace(self._context, group=self._group, model=copied(self._context.model))
        if self._loop is not None:
            self._loop.last = whole.head.step
        try:
            training = make_training(context, self._planned(generation), self._config, is_foretold=False)
        except (InvalidInput, DoesNotFit) as error:
            if self._ranks.is_followed_within(context.env.patience):
                return None
            raise DoesNotFit(self._words_of_misfit(error, generation, whole)) from error
        whole.restore(training)
        training.model.train()
        self._state.live_in(training)
        return training

    def _planned(self, generation: Generation) -> Plan:
        return plan_among(self._plan, generation.nodes, self._context.env.nodes, self._config.shares)

    def _words_of_misfit(self, error: Exception, generation: Generation, whole: HeldState) -> str:
        """Why the run ends, once the leader has written the whole state."""
        if self._group.is_leader:
            Checkpoints(self._config.checkpoint_folder).write(whole.checkpoint)
        self._group.barrier()
        count = len(generation.nodes)
        return (
            f"{count} node{'' if count == 1 else 's'} of {len(self._plan.assignments)} are left, and hold the model no "
            f"more: {error}; the whole state after step {whole.head.step} is in {self._config.checkpoint_folder}: "
            "go on with --resume on as many nodes as the run began with, or with --memory for those that are left"
        )

    def _resumed(self, training: Training, whole: HeldState, writing: ExitStack) -> Loop:
        """The loop that goes on from `whole` with `training`."""
        loop = self._new_loop(training) if self._loop is None else self._loop
        if not self._is_writing:
            writing.enter_context(loop.saving.writing())
        self._loop, self._training, self._is_writing = loop, training, True
        loop.monitor.history, loop.last = whole.history, whole.head.step
        loop.regroup(training, [assignment.node for assignment in self._plan.assignments])
        self._settled = loop.last if whole.head.is_settled else _NONE
        return loop

    def _begin_copies(self, loop: Loop) -> None:
        """Copy parts that nobody else has, from now on every k steps, and let the whole state go."""
        assert self._training is not None
        copies, plan = self._state.copies, self._training.plan
        if len(plan.replica_ranks) > 1 or self._group.size == 1:
            copies.end()
        else:
            self._copy(loop)
            if plan is not self._plan:  # which says so itself
                loop.monitor.emit(Event(step=loop.last, kind="copies", message=copies.words))
        self._state.whole = None

    def _copy(self, loop: Loop) -> None:
        """Copy parts, after a step that all have made."""
        history, prediction = loop.monitor.history, self._plan.prediction
        seconds = prediction.step_seconds if prediction else 0.0
        if history.last_step:
            seconds = history.seconds / history.last_step
        self._state.copies.copy(loop.last, self._state.encoded(loop), seconds or FAULT_SECONDS)

    def _train(self, loop: Loop, training: Training) -> bool:
        """Steps to the last; False if other ranks are to take part before."""
        loader = loop.loader(loop.last + 1)
        loop.monitor.start(loop.last + 1)
        if not self._is_settled:
            self._settle(loop)
        while loop.last < training.num_steps and not self._was_ended and not loop.monitor.is_leaving:
            self._is_ready = False
            self._state.keep_buffers(loop.last + 1)
            self._ranks.at_step(loop.last + 1)
            loop.one_step(loop.last + 1, loader)
            self._settle(loop)
            if self._state.copies.is_due(loop.last):
                loop.monitor.settle()
                self._copy(loop)
        loop.monitor.settle()
        return self._was_ended or loop.last == training.num_steps

    def _settle(self, loop: Loop) -> None:
        """Do what follows the last step; again, if somebody was lost meanwhile."""
        history = loop.monitor.history
        history.validations = [one for one in history.validations if one.step != loop.last]
        self._was_ended = loop.after_step(loop.last)
        self._settled, self._mark = loop.last, time.perf_counter()

    def _finish(self, loop: Loop, training: Training, finish: Callable[[Training, History], None]) -> None:
        loop.saving.settle()  # the record tells of them
        history = loop.monitor.history
        history.wall_seconds = time.perf_counter() - self._begin
        finish(replace(training, plan=self._plan), history)
        self._group.barrier()
