"""The order in which a pipeline stage works on its micro-batches, and the duration of a step in that order.

Four stages, three micro-batches; a number is a forward pass, a letter the backward pass of that micro-batch:

    GPipe (Huang et al., 2019)            1F1B (Narayanan et al., 2019)
    stage 0  0 1 2 . . . . . . c b a      stage 0  0 1 2 . . . . a . b . c
    stage 1  . 0 1 2 . . . . c b a .      stage 1  . 0 1 2 . . a . b . c .
    stage 2  . . 0 1 2 . . c b a . .      stage 2  . . 0 1 . a 2 b . c . .
    stage 3  . . . 0 1 2 c b a . . .      stage 3  . . . 0 a 1 b 2 c . . .

Both idle for (K-1) / (M+K-1) of the time. GPipe holds all M micro-batches, 1F1B at most K - k on stage k.

Zero bubble (Qi et al., 2024) divides the last 2(K-1) backward passes: the gradients of a stage's inputs, for which an
earlier stage waits (a letter), and those of its weights, which fill the time in which it would idle (a capital letter).
The inputs of the first stage need no gradients:

    stage 0  0 1 2 3 4 5 6 . . . a a 7 b b c c d d e e f f g g h h
    stage 1  . 0 1 2 3 4 . . a a 5 b b 6 c 7 d C e D f E g F h G H
    stage 2  . . 0 1 2 . a a 3 b b 4 c 5 d 6 e C 7 f D g E h F G H
    stage 3  . . . 0 a a 1 b b 2 c 3 d 4 e 5 f C 6 g D 7 h E F G H

Stage k holds at most 2K - 1 - k micro-batches. Stages of equal duration idle for (K-1) / (3M+K-1) of the time, until
the first micro-batch comes, if a forward pass takes a third of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from evener.records.errors import require_one_of

Kind = Literal["forward", "recompute", "backward", "weights", "evaluate"]
ScheduleName = Literal["gpipe", "1f1b", "zero-bubble"]
ScheduleChoice = Literal["auto", "gpipe", "1f1b", "zero-bubble"]
"""A schedule, or `auto`: `zero-bubble` where that is predicted to be faster than `1f1b`."""
Rematerialise = Literal["always", "except_last", "never", "auto"]
"""For which micro-batches a stage recomputes activations in the backward pass to save memory."""


class Action(NamedTuple):
    """A pass over one micro-batch."""

    kind: Kind
    micro_batch: int


def gpipe(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    """Return all forward passes, then all backward passes in reverse order; it is the same for all stages."""
    del stage, num_stages
    forward = [Action("forward", i) for i in range(micro_batches)]
    return forward + [Action("backward", i) for i in reversed(range(micro_batches))]


def one_forward_one_backward(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    """Return forward passes for the stages behind this one, then forward and backward passes in turn."""
    ahead = min(num_stages - 1 - stage, micro_batches)
    actions = [Action("forward", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            actions.append(Action("forward", i + ahead))
        actions.append(Action("backward", i))
    return actions


def zero_bubble(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    """Return the passes of 1F1B with twice as many forward passes ahead; the last backward passes are divided."""
    ahead = min(2 * (num_stages - 1 - stage), micro_batches)
    undivided = max(0, micro_batches - 2 * (num_stages - 1)) if stage else micro_batches
    actions = [Action("forward", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            actions.append(Action("forward", i + ahead))
        actions.append(Action("backward", i))
        if i - stage >= undivided:
            actions.append(Action("weights", i - stage))
    return actions + [Action("weights", i) for i in range(max(undivided, micro_batches - stage), micro_batches)]


SCHEDULES: dict[ScheduleName, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zero-bubble": zero_bubble,
}


_WORTH = 0.98
"""Largest part of another schedule's time for which `zero-bubble` is chosen, as it holds more activations."""


def candidates(choice: ScheduleChoice, *, are_divided: bool = False) -> tuple[ScheduleName, ...]:
    """Return the schedules among which `choice` leaves the choice, the one that holds less first.

    Args:
        choice: as the user stated it.
        are_divided: whether several ranks divide the layers of a stage, whose backward passes cannot be divided, too.
    """
    require_one_of("schedule", choice, get_args(ScheduleChoice))
    if choice != "auto":
        return (choice,)
    return ("1f1b",) if are_divided else ("1f1b", "zero-bubble")


def is_worth_more(seconds: float, than: float) -> bool:
    """Return whether a step of `seconds` is so much shorter `than` another one that it may hold more activations."""
    return seconds <= _WORTH * than


def evaluation(micro_batches: int) -> list[Action]:
    """Return forward passes whose activations are not kept."""
    return [Action("evaluate", i) for i in range(micro_batches)]


def divided_in(actions: Sequence[Action]) -> frozenset[int]:
    """Return the micro-batches whose backward pass leaves the gradients of weights to a later pass."""
    return frozenset(action.micro_batch for action in actions if action.kind == "weights")


def with_recomputing(actions: Sequence[Action], recomputed: Collection[int]) -> list[Action]:
    """Return `actions` with a second forward pass before the backward pass of each micro-batch in `recomputed`.

    A stage begins it as soon as it is idle, before the gradient that its backward pass needs arrives. The backward pass
    is not divided, so that such a micro-batch is not held any longer.
    """
    result = []
    for action in actions:
        if action.micro_batch in recomputed and action.kind == "backward":
            result.append(Action("recompute", action.micro_batch))
        if action.micro_batch not in recomputed or action.kind != "weights":
            result.append(action)
    return result


def max_held(actions: Sequence[Action], recomputed: Collection[int] = ()) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at once.

    Those in `recomputed` are held from their recomputation only.
    """
    performed = with_recomputing(actions, recomputed)
    divided = divided_in(performed)
    held = largest = 0
    for action in performed:
        if action.kind == "weights" or (action.kind == "backward" and action.micro_batch not in divided):
            held -= 1
        elif action.kind == "recompute" or (action.kind == "forward" and action.micro_batch not in recomputed):
            held += 1
        largest = max(largest, held)
    return largest


def bubble(num_stages: int, micro_batches: int) -> float:
    """Return the fraction of time for which equal stages idle: (K-1) / (M+K-1)."""
    return (num_stages - 1) / (micro_batches + num_stages - 1)


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A simulated step of a pipeline, pass by pass.

    Attributes:
        seconds: from the first pass to the last.
        busy: seconds that each stage computes.
        passes: the passes of each stage, in order: (action, start, end).
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
    *,
    recomputes: bool = False,
) -> SimulatedStep:
    """Simulate a step in which a pass starts when its stage is free and its input has arrived.

    Args:
        forward, backward: seconds of each stage for one micro-batch. In a backward pass that the schedule divides, the
            gradients of weights take half of the time.
        micro_batches: number of micro-batches of the step.
        schedule: order of passes of each stage.
        transfer: seconds from stage k to stage k+1 and back, one for each stage but the last; zero by default.
        recomputes: whether backward passes recompute activations, as part of their seconds, and so are not divided.
    """
    num_stages = len(forward)
    links = [*(transfer or [0.0] * (num_stages - 1)), 0.0]
    todo = [SCHEDULES[schedule](k, num_stages, micro_batches) for k in range(num_stages)]
    if recomputes:
        todo = [[action for action in actions if action.kind != "weights"] for actions in todo]
    divided = [divided_in(actions) for actions in todo]
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
                part = 0.5 if action.micro_batch in divided[k] else 1.0
                free[k] = ends[k][action] = start + (forward[k] if action.kind == "forward" else part * backward[k])
                passes[k].append((action, start, free[k]))
        unfinished = [k for k in unfinished if len(passes[k]) < len(todo[k])]
    busy = tuple(micro_batches * (f + b) for f, b in zip(forward, backward, strict=True))
    return SimulatedStep(seconds=max(free), busy=busy, passes=tuple(map(tuple, passes)))


def _arrival(ends: Sequence[dict[Action, float]], stage: int, action: Action, links: Sequence[float]) -> float | None:
    """Return when the input of a pass is available; None while that is unknown."""
    if action.kind == "weights":
        return ends[stage].get(Action("backward", action.micro_batch))
    if action.kind == "forward":
        if stage == 0:
            return 0.0
        end = ends[stage - 1].get(action)
        return None if end is None else end + links[stage - 1]
    if stage == len(ends) - 1:
        return ends[stage].get(Action("forward", action.micro_batch))
    end = ends[stage + 1].get(action)
    return None if end is None else end + links[stage]
