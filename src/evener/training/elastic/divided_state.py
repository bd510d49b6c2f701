"""A rank's parts of a divided model's state, and how all ranks assemble the newest whole state.

live      the part that it trains; of the step that its weights contain
whole     from its assembly until all ranks have taken their parts
copies    of its part and a neighbour's, where no other replica has them (`part_copies`)

The run continues from the newest step whose parts cover every tensor. With several replicas this is the last step,
because another replica holds the parts of a lost rank. With a single replica it is the step of the last copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.oracle.division.layout import Shape
from evener.oracle.division.pieces import Piece, covers
from evener.records.errors import NodeLost
from evener.records.history import History
from evener.records.record import Event
from evener.records.schema import Finite, Part, Whole
from evener.training.elastic.held_state import HeldState, StateHead, assemble, head_of
from evener.training.elastic.part_copies import PartCopies
from evener.training.elastic.state_transfer import share_states
from evener.training.loop import Loop
from evener.training.training import Training

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
        self._shapes = {name: shape for row in rows for name, shape in msgspec.json.decode(row).items()}
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
        """Assemble the newest whole state from the parts of all ranks, each of which calls this.

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
        choice = choose([msgspec.json.decode(row, type=HeldParts) for row in self._group.all_gather_bytes(holdings)])
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
        rows = [msgspec.json.decode(row, type=_RunProgress) for row in encoded]
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
