"""Simulates the schedule of a pipeline: when each stage computes which micro-batch, and when it waits.

    GPipe    F0 F1 .. F(M-1) | B(M-1) .. B1 B0                  all forward passes first
    1F1B     F0 .. F(K-k-1) | B0 F(K-k) | B1 F(K-k+1) .. | ..   stage k of K; holds at most K - k micro-batches

A pass starts when its stage is free and its input has arrived: from the stage before (forward) or behind (backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Order: TypeAlias = Literal["gpipe", "1f1b"]
_Pass: TypeAlias = tuple[Literal["F", "B"], int]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: from the first pass to the last.
        busy: seconds that every stage computes.
        passes: of every stage, in order: (`F` or `B`, micro-batch, start, end).
    """

    seconds: float
    busy: tuple[float, ...]
    passes: tuple[tuple[tuple[str, int, float, float], ...], ...]

    @property
    def bubble(self) -> float:
        """The fraction of all stages' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    order: Order = "1f1b",
    transfer: Sequence[float] = (),
) -> Timeline:
    """The step of a pipeline.

    Args:
        forward, backward: seconds of every stage for one micro-batch.
        micro_batches: of the step.
        order: of the passes on a stage.
        transfer: seconds from stage k to stage k+1 and back, one for each but the last; zero by default.
    """
    stages = len(forward)
    wire = [*(transfer or [0.0] * (stages - 1)), 0.0]
    todo = [passes_of(k, stages, micro_batches, order) for k in range(stages)]
    ends: list[dict[_Pass, float]] = [{} for _ in range(stages)]
    free, position = [0.0] * stages, [0] * stages
    done: list[list[tuple[str, int, float, float]]] = [[] for _ in range(stages)]
    active = set(range(stages))
    while active:
        for k in sorted(active):
            while position[k] < len(todo[k]):
                kind, micro = todo[k][position[k]]
                arrival = _arrival(ends, k, kind, micro, wire)
                if arrival is None:
                    break
                start = max(free[k], arrival)
                free[k] = start + (forward[k] if kind == "F" else backward[k])
                ends[k][kind, micro] = free[k]
                done[k].append((kind, micro, start, free[k]))
                position[k] += 1
        active = {k for k in active if position[k] < len(todo[k])}
    return Timeline(
        seconds=max(free),
        busy=tuple(micro_batches * (f + b) for f, b in zip(forward, backward, strict=True)),
        passes=tuple(tuple(passes) for passes in done),
    )


def passes_of(stage: int, stages: int, micro_batches: int, order: Order) -> list[_Pass]:
    """What `stage` does, in order."""
    if order == "gpipe":
        return [("F", m) for m in range(micro_batches)] + [("B", m) for m in reversed(range(micro_batches))]
    ahead = min(stages - stage - 1, micro_batches)
    passes: list[_Pass] = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        passes += [("F", m + ahead)] if m + ahead < micro_batches else []
        passes.append(("B", m))
    return passes


def held(stage: int, stages: int, micro_batches: int, order: Order) -> int:
    """Micro-batches whose activations `stage` holds at once, at most."""
    return micro_batches if order == "gpipe" else min(stages - stage, micro_batches)


def _arrival(
    ends: Sequence[dict[_Pass, float]], stage: int, kind: str, micro: int, wire: Sequence[float]
) -> float | None:
    """When the input of a pass is there; None while that is not known."""
    if kind == "F":
        if stage == 0:
            return 0.0
        end = ends[stage - 1].get(("F", micro))
        return None if end is None else end + wire[stage - 1]
    if stage == len(ends) - 1:
        return ends[stage].get(("F", micro))
    end = ends[stage + 1].get(("B", micro))
    return None if end is None else end + wire[stage]
