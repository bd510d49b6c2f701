"""In which order a stage of a pipeline works on its micro-batches, and how long a step takes in that order.

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
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "evaluate"]
ScheduleName = Literal["gpipe", "1f1b"]
Rematerialise = Literal["always", "except_last", "never", "auto"]
"""Which micro-batches a stage computes a second time for their backward pass, to hold less."""


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


def max_held(actions: Sequence[Action], recomputed: Collection[int] = ()) -> int:
    """Micro-batches whose activations a stage holds at once, at most: those `recomputed` only from then on."""
    held = most = 0
    for action in with_recomputing(actions, recomputed):
        if action.kind == "backward":
            held -= 1
        elif action.kind == "recompute" or action.micro_batch not in recomputed:
            held += 1
        most = max(most, held)
    return most


def bubble(num_stages: int, micro_batches: int) -> float:
    """Share of the time for which equal stages idle: (K-1) / (M+K-1)."""
    return (num_stages - 1) / (micro_batches + num_stages - 1)


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A step of a pipeline, pass by pass.

    Attributes:
        seconds: from the first pass to the last.
        busy: seconds that every stage computes.
        passes: of every stage, in order: (action, start, end).
    """

    seconds: float
    busy: tuple[float, ...]
    passes: tuple[tuple[tuple[Action, float, float], ...], ...]


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    schedule: ScheduleName = "1f1b",
    transfer: Sequence[float] = (),
) -> SimulatedStep:
    """A step in which a pass starts when its stage is free and its input has come: from the stage before, or behind.

    Args:
        forward, backward: seconds of every stage for one micro-batch.
        micro_batches: of the step.
        schedule: of every stage.
        transfer: seconds from stage k to stage k+1 and back, one for each but the last; zero by default.
    """
    num_stages = len(forward)
    links = [*(transfer or [0.0] * (num_stages - 1)), 0.0]
    todo = [SCHEDULES[schedule](k, num_stages, micro_batches) for k in range(num_stages)]
    ends: list[dict[Action, float]] = [{} for _ in range(num_stages)]
    passes: list[list[tuple[Action, float, float]]] = [[] for _ in range(num_stages)]
    free = [0.0] * num_stages
    unfinished = list(range(num_stages))
    while unfinished:
        for k in unfinished:
            while len(passes[k]) < len(todo[k]):
                action = todo[k][len(passes[k])]
                arrival = _arrival(ends, k, action, links)
                if arrival is None:
                    break
                start = max(free[k], arrival)
                free[k] = ends[k][action] = start + (forward[k] if action.kind == "forward" else backward[k])
                passes[k].append((action, start, free[k]))
        unfinished = [k for k in unfinished if len(passes[k]) < len(todo[k])]
    busy = tuple(micro_batches * (f + b) for f, b in zip(forward, backward, strict=True))
    return SimulatedStep(seconds=max(free), busy=busy, passes=tuple(map(tuple, passes)))


def _arrival(ends: Sequence[dict[Action, float]], stage: int, action: Action, links: Sequence[float]) -> float | None:
    """When the input of a pass is there; None while that is not known."""
    if action.kind == "forward":
        if stage == 0:
            return 0.0
        end = ends[stage - 1].get(action)
        return None if end is None else end + links[stage - 1]
    if stage == len(ends) - 1:
        return ends[stage].get(Action("forward", action.micro_batch))
    end = ends[stage + 1].get(action)
    return None if end is None else end + links[stage]
