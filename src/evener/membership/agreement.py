"""What the ranks of a new generation agree upon before they compute: from which state they go on. Pure.

A step that somebody's loss tore is finished on some ranks and not on others. The state of the highest step is the one
to go on from: who finished a step had the gradients of all. Whoever is below it, or new, takes it over. Nobody votes
in steps that nothing disturbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.records.errors import NodeLost
from evener.records.schema import Part, Whole


class Standing(Part, frozen=True, kw_only=True):
    """What a rank brings into a generation.

    Attributes:
        step: last one that its weights contain; -1 for one that has no state yet.
        is_settled: whether what follows that step (validation, checkpoint) is done on this rank.
    """

    step: Whole
    is_settled: bool = True


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """From where a generation goes on.

    Attributes:
        step: that the weights of all contain from now on.
        source: rank whose state it is.
        gifts: who has to take it over, in order, and from whom: (rank that has it, rank that does not).
        new: those who do not have it and never had any.
        is_settled: whether what follows the step is done on all that made it.
    """

    step: int
    source: int
    gifts: tuple[tuple[int, int], ...]
    new: tuple[int, ...]
    is_settled: bool


def agree(standings: Sequence[Standing]) -> Agreement:
    """What all ranks conclude from what each of them brings, in order of ranks.

    Raises:
        NodeLost: none of them has a state.
    """
    step = max(one.step for one in standings)
    if step < 0:
        raise NodeLost("no node that is left holds the state of the training; go on from a checkpoint with --resume")
    holders = [rank for rank, one in enumerate(standings) if one.step == step]
    needy = [rank for rank in range(len(standings)) if rank not in holders]
    return Agreement(
        step=step,
        source=holders[0],
        gifts=tuple((holders[i % len(holders)], rank) for i, rank in enumerate(needy)),
        new=tuple(rank for rank in needy if standings[rank].step < 0),
        is_settled=all(standings[rank].is_settled for rank in holders),
    )
