"""In which order a stage works on its micro-batches: tables, one row a stage.

Four stages, three micro-batches; a number is a forward pass, a letter the backward pass of that micro-batch:

    GPipe (Huang et al., 2019)            1F1B (Narayanan et al., 2019)
    stage 0  0 1 2 . . . . . . c b a      stage 0  0 1 2 . . . . a . b . c
    stage 1  . 0 1 2 . . . . c b a .      stage 1  . 0 1 2 . . a . b . c .
    stage 2  . . 0 1 2 . . c b a . .      stage 2  . . 0 1 . a 2 b . c . .
    stage 3  . . . 0 1 2 c b a . . .      stage 3  . . . 0 a 1 b 2 c . . .

Both idle for (K-1) / (M+K-1) of the time. GPipe holds all M micro-batches, 1F1B at most K - k on stage k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "evaluate"]
ScheduleName = Literal["gpipe", "1f1b"]


class Action(NamedTuple):
    """One thing to do with one micro-batch."""

    kind: Kind
    micro_batch: int


def gpipe(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes in reverse order; alike for all stages."""
    del stage, num_stages
    forward = [Action("forward", i) for i in range(micro_batches)]
    return forward + [Action("backward", i) for i in reversed(range(micro_batches))]


def one_forward_one_backward(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    """As many forward passes as there are stages behind this one, then forward and backward in turn."""
    ahead = min(num_stages - 1 - stage, micro_batches)
    actions = [Action("forward", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            actions.append(Action("forward", i + ahead))
        actions.append(Action("backward", i))
    return actions


SCHEDULES: dict[ScheduleName, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def evaluation(micro_batches: int) -> list[Action]:
    """Forward passes of which nothing is kept."""
    return [Action("evaluate", i) for i in range(micro_batches)]


def with_recomputing(actions: Sequence[Action], recomputed: Collection[int]) -> list[Action]:
    """`actions` with a second forward pass in front of the backward pass of every micro-batch in `recomputed`.

    A stage begins it as soon as it has nothing else to do, before the gradient that it needs for backward arrives.
    """
    found = []
    for action in actions:
        if action.kind == "backward" and action.micro_batch in recomputed:
            found.append(Action("recompute", action.micro_batch))
        found.append(action)
    return found


def bubble(num_stages: int, micro_batches: int) -> float:
    """Share of the time for which equal stages idle: (K-1) / (M+K-1)."""
    return (num_stages - 1) / (micro_batches + num_stages - 1)
