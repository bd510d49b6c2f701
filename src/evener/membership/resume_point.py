"""The state from which the ranks of a new generation continue, where each has the whole state. Pure.

When a rank is lost during a step, some ranks finish the step and others do not. The ranks continue from the highest
step, because a rank that finished it had the gradients of all. The other ranks and new ones copy its state. Undisturbed
steps need no choice. Ranks with parts of a model choose in `training.elastic.divided`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.records.errors import NodeLost
from evener.records.schema import Part, Whole


class RankProgress(Part, frozen=True, kw_only=True):
    """A rank's progress when it enters a generation.

    Attributes:
        step: last step in its weights; -1 without a state.
        is_settled: whether validation and checkpoint after that step are done on this rank.
    """

    step: Whole
    is_settled: bool = True


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state from which a generation continues.

    Attributes:
        step: last step in the weights of all ranks.
        source: first rank with that state.
        transfers: (rank with the state, rank without it), in order.
        new: ranks that never had a state.
        is_settled: whether validation and checkpoint after the step are done on all ranks that finished it.
    """

    step: int
    source: int
    transfers: tuple[tuple[int, int], ...]
    new: tuple[int, ...]
    is_settled: bool


def choose_resume_point(progress: Sequence[RankProgress]) -> ResumePoint:
    """Return the state from which all ranks continue, by each one's progress, in order of ranks.

    Raises:
        NodeLost: no rank has a state.
    """
    step = max(one.step for one in progress)
    if step < 0:
        raise NodeLost("no remaining node holds the state of the training; continue from a checkpoint with --resume")
    holders = [rank for rank, one in enumerate(progress) if one.step == step]
    needy = [rank for rank in range(len(progress)) if rank not in holders]
    return ResumePoint(
        step=step,
        source=holders[0],
        transfers=tuple((holders[i % len(holders)], rank) for i, rank in enumerate(needy)),
        new=tuple(rank for rank in needy if progress[rank].step < 0),
        is_settled=all(progress[rank].is_settled for rank in holders),
    )
