"""The elastic loop for a divided model: its state is assembled from the ranks' parts.

    enter the next generation
    assemble the state                   the newest whole one that the ranks' parts make; all ranks get it
    take a part of it                    by a plan for the present ranks
    train                                weights change only when all ranks have their gradients
    copy parts every k steps             where no other replica has them

A rank holds, of the state:

    live      the part that it trains; of the step that its weights contain
    whole     from its assembly until all ranks have taken their parts
    copies    of its part and a neighbour's, where no other replica has them (`part_copies`)

The run continues from the newest step whose parts cover every tensor. With several replicas, a step is made by all or
by none: a rank that is interrupted after all had their gradients makes the update before it continues, so no step is
lost. With one replica, all go back to the step of the last copies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Generation
from evener.membership.resume_point import RankProgress
from evener.oracle.division.layout import Shape
from evener.oracle.division.pieces import Piece, covers
from evener.oracle.replication import MEAN_TIME_BETWEEN_LOSSES_S
from evener.parallel.gradient_hooks import copied
from evener.records.decoding import decode_json
from evener.records.errors import DoesNotFit, InvalidInput, NodeLost
from evener.records.history import History
from evener.records.plan import Assignment, Plan
from evener.records.record import Event
from evener.records.schema import Finite, Part, Whole
from evener.training.admission import publish_places
from evener.training.checkpoint import Checkpoints, write_weights
from evener.training.context import RankContext
from evener.training.elastic.held_state import HeldState, StateHead, assemble, head_of
from evener.training.elastic.loop import NO_STEP, ElasticLoop
from evener.training.elastic.loss_events import add_untold
from evener.training.elastic.part_copies import PartCopies
from evener.training.elastic.plan import plan_among, vacant_places, with_nodes
from evener.training.elastic.state_transfer import share_states
from evener.training.loop import Loop
from evener.training.training import Training, make_training

_NONE = -1
_Held = tuple[StateHead, Callable[[], bytes]]
"""Something that a rank holds: what it is, and how it is encoded."""


class _RunProgress(Part, frozen=True, kw_only=True):
    """A rank's record of the run, including steps that the assembled state does not contain.

    Attributes:
        events: that it knows of.
        lost_seconds: as in a history.
        wall_seconds: since the run began.
    """

    events: list[Event]
    lost_seconds: Finite
    wall_seconds: Finite


class DividedState:
    """This rank's part in the state of a run.

    Args:
        group: the ranks, which change.

    Attributes:
        copies: of parts.
        whole: see above.
    """

    def __init__(self, group: Group) -> None:
        self._group, self.copies = group, PartCopies(group)
        self._live: Training | None = None
        self.whole: HeldState | None = None
        self._shapes: dict[str, Shape] = {}
        self._buffers: list[Tensor] = []
        self._buffers_step = _NONE

    def live_in(self, training: Training) -> None:
        """Use the part in `training` from now on; return when all ranks have theirs."""
        head = head_of(training, 0, is_settled=True)
        rows = self._group.all_gather_bytes(msgspec.json.encode({n: p.shape for n, p in head.weights.items()}))
        self._shapes = {name: shape for row in rows for name, shape in decode_json(row).items()}
        self._live = training
        self._buffers = [buffer.clone() for buffer in training.model.buffers()]
        self._buffers_step = _NONE

    def keep_buffers(self, step: int) -> None:
        """Save buffers before `step`, whose forward pass changes them and may have to be repeated."""
        assert self._live is not None
        if self._buffers:
            torch._foreach_copy_(self._buffers, list(self._live.model.buffers()))
        self._buffers_step = step

    def undo(self, step: int) -> None:
        """Restore the buffers of before `step`, if it had begun."""
        if self._live is not None and self._buffers_step == step:
            for buffer, before in zip(self._live.model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)

    def encoded(self, loop: Loop, *, is_settled: bool = True) -> bytes:
        """Return this rank's encoded part after the last step of `loop`."""
        assert self._live is not None
        return HeldState.of(self._live, loop.state(loop.last), loop.monitor.history, is_settled=is_settled).encode()

    def put_together(self, loop: Loop | None, wall_seconds: float, *, is_settled: bool) -> HeldState:
        """Assemble the newest whole state from the parts of all ranks; all ranks call this.

        Args:
            loop: of this rank; None if it has just joined.
            wall_seconds: since the run began here.
            is_settled: whether what follows its last step is done.

        Raises:
            NodeLost: they do not hold all parts of any.
        """
        held = self._held(loop, is_settled)
        offered = tuple(HeldPart(step=head.step, pieces=head.weights) for head, _ in held)
        holdings = msgspec.json.encode(HeldParts(held=offered, shapes=self._shapes))
        choice = choose([decode_json(row, HeldParts) for row in self._group.all_gather_bytes(holdings)])
        encoded = [held[number][1]() for rank, number in choice.givers if rank == self._group.rank]
        whole = assemble(share_states(encoded, self._group))
        self._update_history(whole.history, loop, wall_seconds)
        self.whole, self._live = whole, None
        return whole

    def _held(self, loop: Loop | None, is_settled: bool) -> list[_Held]:
        states: list[_Held] = [(head, partial(bytes, data)) for head, data in self.copies.held()]
        if self.whole is not None:
            states.append((self.whole.head, self.whole.encode))
        if self._live is not None and loop is not None:
            head = head_of(self._live, loop.last, is_settled=is_settled)
            states.append((head, lambda: self.encoded(loop, is_settled=is_settled)))
        return states

    def _update_history(self, history: History, loop: Loop | None, wall_seconds: float) -> None:
        """Update `history` with all events so far, since the run may have gone back to an earlier step."""
        known = History() if loop is None else loop.monitor.history
        progress = _RunProgress(events=known.events, lost_seconds=known.lost_seconds, wall_seconds=wall_seconds)
        encoded = self._group.all_gather_bytes(msgspec.json.encode(progress))
        rows = [decode_json(row, _RunProgress) for row in encoded]
        history.events = max((row.events for row in rows), key=len)
        history.lost_seconds = max(row.lost_seconds for row in rows)
        history.wall_seconds = max(row.wall_seconds for row in rows)


class HeldPart(Part, frozen=True, kw_only=True):
    """A part of the state after a step that a rank holds.

    Attributes:
        step: of the state.
        pieces: of weights, by name.
    """

    step: Whole
    pieces: dict[str, Piece]


class HeldParts(Part, frozen=True, kw_only=True):
    """The parts that one rank holds, and the shapes of the whole state.

    Attributes:
        held: parts of the rank.
        shapes: of all tensors of the whole state, by name; empty if unknown.
    """

    held: tuple[HeldPart, ...]
    shapes: dict[str, Shape] = {}


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The parts that form the whole state.

    Attributes:
        step: of the state.
        givers: needed parts as (rank, index of its part), the largest first.
    """

    step: int
    givers: tuple[tuple[int, int], ...]


def choose(rows: Sequence[HeldParts]) -> Recovery:
    """Return the newest whole state that the parts of all ranks, `rows`, can form.

    Raises:
        NodeLost: the parts do not cover the model.
    """
    shapes = next((row.shapes for row in rows if row.shapes), {})
    steps = sorted({one.step for row in rows for one in row.held}, reverse=True)
    for step in steps if shapes else ():
        givers = _givers(rows, shapes, step)
        if givers:
            return Recovery(step=step, givers=givers)
    raise NodeLost(
        "the remaining nodes do not hold all parts of the model; continue from the last checkpoint with --resume"
    )


def _givers(rows: Sequence[HeldParts], shapes: Mapping[str, Shape], step: int) -> tuple[tuple[int, int], ...]:
    """Return as few parts of `step` as cover all tensors; empty if they do not."""
    offered = [
        (rank, number, one.pieces)
        for rank, row in enumerate(rows)
        for number, one in enumerate(row.held)
        if one.step == step
    ]
    missing, met = set(shapes), dict.fromkeys(shapes, frozenset[Piece]())
    givers = []
    for rank, number, pieces in sorted(offered, key=lambda one: (-_amount(one[2]), one[0])):
        new = [name for name in pieces.keys() & missing if pieces[name] not in met[name]]
        if not new:
            continue
        givers.append((rank, number))
        for name in new:
            met[name] |= {pieces[name]}
            if covers(met[name], shapes[name]):
                missing.discard(name)
    return () if missing else tuple(givers)


def _amount(pieces: Mapping[str, Piece]) -> int:
    """Return the number of elements of all tensors."""
    return sum(piece.numel for piece in pieces.values())


class DividedElasticLoop(ElasticLoop):
    """One rank's loop through the generations of a run.

    Args:
        context: of this rank, whose model is whole, and is copied for every generation.
        plan: with which the run began.
        config: of the run.
        membership: of this rank among those that change.
        training: of an initial rank, before the first generation; None for a rank that joins later.
        own_place: the place of this rank's node, if the plan does not know the node.
    """

    def __init__(
        self,
        context: RankContext,
        plan: Plan,
        config: RunConfig,
        membership: ElasticGroup,
        training: Training | None,
        own_place: Assignment | None = None,
    ) -> None:
        super().__init__(context.group, plan, config, membership)
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
        return Loop(training, self._config, self._before_update, lambda: self._membership.is_followed)

    def _before_update(self) -> None:
        """Wait until all ranks have their gradients of this step, if there are several replicas."""
        self._membership.fence()
        if self._training is not None and len(self._training.plan.replica_ranks) > 1:
            self._is_ready = True
            self._group.barrier()

    def _enter(self) -> tuple[Loop, Training]:
        while True:
            generation = self._membership.enter()
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
        self._tell(self._membership.what_began(), loop, training, max(0, before - loop.last))
        self._begin_copies(loop)
        return loop, training

    def _add_nodes(self) -> None:
        """Add nodes that joined to the plan of the whole run; the leader announces a changed plan."""
        rows = self._group.all_gather_bytes(msgspec.json.encode(self._came))
        assignments = [one for row in rows for one in decode_json(row, list[Assignment])]
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
        newest = max(decode_json(row, RankProgress).step for row in rows)
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
            if self._membership.is_followed_within(context.env.patience):
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

    def _train(self, loop: Loop, training: Training) -> bool:
        is_over = super()._train(loop, training)
        if not is_over and self._state.copies.every:
            self._copy(loop)  # for ranks that leave with their parts
        return is_over

    def _before_step(self, step: int) -> None:
        self._is_ready = False
        self._state.keep_buffers(step)

    def _after_step(self, loop: Loop) -> None:
        """Copy parts, if it is time to."""
        if self._state.copies.is_due(loop.last):
            loop.monitor.settle()
            self._copy(loop)
