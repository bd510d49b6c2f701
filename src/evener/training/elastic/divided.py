"""The elastic loop for a divided model: its state is assembled from the ranks' parts.

enter the next generation
assemble the state                   the newest whole one that the ranks' parts make; all ranks get it
take a part of it                    by a plan for the present ranks
train                                weights change only when all ranks have their gradients
copy parts every k steps             where no other replica has them

With several replicas, a step is made by all or by none: a rank that is interrupted after all had their gradients
makes the update before it continues, so no step is lost. With one replica, all go back to the step of the last copies.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import msgspec

from evener.config.run_config import RunConfig
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Generation
from evener.membership.resume_point import RankProgress
from evener.oracle.replication import MEAN_TIME_BETWEEN_LOSSES_S
from evener.parallel.gradient_hooks import copied
from evener.records.errors import DoesNotFit, InvalidInput
from evener.records.plan import Assignment, Plan
from evener.records.record import Event
from evener.training.admission import publish_places
from evener.training.checkpoint import Checkpoints, write_weights
from evener.training.context import RankContext
from evener.training.elastic.divided_state import DividedState
from evener.training.elastic.held_state import HeldState
from evener.training.elastic.loop import NO_STEP, ElasticLoop
from evener.training.elastic.plan import plan_among, vacant_places, with_nodes
from evener.training.elastic.telling import add_untold
from evener.training.loop import Loop
from evener.training.training import Training, make_training


class DividedElasticLoop(ElasticLoop):
    """One rank's loop through the generations of a run.

    Args:
        context: of this rank, whose model is whole, and is copied for every generation.
        plan: with which the run began.
        config: of the run.
        ranks: that change.
        training: of an initial rank, before the first generation; None for a rank that joins later.
        own_place: the place of this rank's node, if the plan does not know the node.
    """

    def __init__(
        self,
        context: RankContext,
        plan: Plan,
        config: RunConfig,
        ranks: ElasticGroup,
        training: Training | None,
        own_place: Assignment | None = None,
    ) -> None:
        super().__init__(context.group, plan, config, ranks)
        self._context, self._training, self._first_plan = context, training, plan
        self._came = [] if own_place is None else [own_place]
        self._state = DividedState(self._group)
        self._loop = None if training is None else self._new_loop(training)
        self._is_ready = False  # whether all gradients of the step under way are complete here

    def _begin_run(self) -> bool:
        if self._loop is None or self._training is None:
            return False
        self._start(self._loop)
        self._state.live_in(self._training)
        return True

    def _new_loop(self, training: Training) -> Loop:
        return Loop(training, self._config, self._before_update, lambda: self._ranks.is_followed)

    def _before_update(self) -> None:
        """Wait until all ranks have their gradients of this step, if there are several replicas."""
        self._ranks.fence()
        if self._training is not None and len(self._training.plan.replica_ranks) > 1:
            self._is_ready = True
            self._group.barrier()

    def _enter(self) -> tuple[Loop, Training]:
        while True:
            generation = self._ranks.enter()
            before = self._complete_step()
            self._add_nodes()
            wall = 0.0 if self._loop is None else time.perf_counter() - self._begin
            whole = self._state.put_together(self._loop, wall, is_settled=self._is_settled)
            self._begin = time.perf_counter() - whole.history.wall_seconds
            training = self._built(generation, whole)
            if training is not None:
                break
        loop = self._resumed(training, whole)
        publish_places(self._context.env, self._group, vacant_places(self._first_plan, generation.nodes, self._came))
        self._tell(self._ranks.what_began(), loop, training, max(0, before - loop.last))
        self._begin_copies(loop)
        return loop, training

    def _add_nodes(self) -> None:
        """Add nodes that joined to the plan of the whole run; the leader announces a changed plan."""
        rows = self._group.all_gather_bytes(msgspec.json.encode(self._came))
        assignments = [one for row in rows for one in msgspec.json.decode(row, type=list[Assignment])]
        self._came = list({one.node: one for one in assignments}.values())
        plan = with_nodes(self._plan, self._came)
        if plan is not self._plan:
            self._plan = plan
            if self._group.is_leader:
                self._context.env.notify(plan)

    def _complete_step(self) -> int:
        """Complete the step that others have made, or undo a partial one; return the newest step of any rank."""
        loop, last = self._loop, NO_STEP if self._loop is None else self._loop.last
        rows = self._group.all_gather_bytes(msgspec.json.encode(RankProgress(step=last)))
        newest = max(msgspec.json.decode(row, type=RankProgress).step for row in rows)
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
        """Return this rank's part of `whole` for `generation`; None if no plan fits and more ranks come soon."""
        context = replace(self._context, group=self._group, model=copied(self._context.model))
        if self._loop is not None:
            self._loop.last = whole.head.step
        try:
            training = make_training(context, self._planned(generation), self._config, is_predicted=False)
        except (InvalidInput, DoesNotFit) as error:
            if self._ranks.is_followed_within(context.env.patience):
                return None
            raise DoesNotFit(self._save_misfit(error, generation, whole)) from error
        whole.restore(training)
        training.model.train()
        self._state.live_in(training)
        return training

    def _planned(self, generation: Generation) -> Plan:
        return plan_among(self._first_plan, generation.nodes, self._config.shares, self._came)

    def _save_misfit(self, error: Exception, generation: Generation, whole: HeldState) -> str:
        """Have the leader save the state, and return why the run ends."""
        outcome = self._save_state(whole)
        self._group.barrier()
        count = len(generation.nodes)
        remaining = f"{count} node{'' if count == 1 else 's'} of {len(self._first_plan.assignments)} are left"
        return f"{remaining}, which cannot hold the model: {error}; {outcome}"

    def _save_state(self, whole: HeldState) -> str:
        """Have the leader save the state; return where it is, and how to continue."""
        config, after = self._config, f"after step {whole.head.step}"
        if not config.keeps_checkpoints:
            if self._group.is_leader:
                write_weights(whole.checkpoint.weights, config.folder)
            return f"its weights {after} are what remains: train again when as many nodes have joined"
        if self._group.is_leader:
            Checkpoints(config.checkpoint_folder).write(whole.checkpoint)
        return (
            f"the whole state {after} is in {config.checkpoint_folder}: "
            "go on with --resume on as many nodes as the run began with, or with --memory for those that are left"
        )

    def _resumed(self, training: Training, whole: HeldState) -> Loop:
        """Return the loop that continues from `whole` with `training`."""
        loop = self._new_loop(training) if self._loop is None else self._loop
        self._loop, self._training = loop, training
        loop.monitor.history, loop.last = whole.history, whole.head.step
        loop.regroup(training, [assignment.node for assignment in self._plan.assignments])
        gc.collect()  # a graph of torch.fx refers to itself, and that of a stage before to its weights
        self._settled = loop.last if whole.head.is_settled else NO_STEP
        return loop

    def _begin_copies(self, loop: Loop) -> None:
        """Copy parts that no other rank has, from now on every k steps, and free the whole state."""
        assert self._training is not None
        copies, plan = self._state.copies, self._training.plan
        if len(plan.replica_ranks) > 1 or self._group.size == 1:
            copies.end()
        else:
            self._copy(loop)
            if plan is not self._first_plan:  # which says so itself
                loop.monitor.emit(Event(step=loop.last, kind="copies", message=copies.words))
        self._state.whole = None

    def _copy(self, loop: Loop) -> None:
        """Copy parts, after a step that all have made."""
        history, prediction = loop.monitor.history, self._plan.prediction
        seconds = prediction.step_seconds if prediction else 0.0
        if history.last_step:
            seconds = history.seconds / history.last_step
        self._state.copies.copy(loop.last, self._state.encoded(loop), seconds or MEAN_TIME_BETWEEN_LOSSES_S)

    def _before_step(self, step: int) -> None:
        self._is_ready = False
        self._state.keep_buffers(step)

    def _after_step(self, loop: Loop) -> None:
        """Copy parts, if it is time to."""
        if self._state.copies.is_due(loop.last):
            loop.monitor.settle()
            self._copy(loop)
