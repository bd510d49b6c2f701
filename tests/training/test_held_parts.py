"""Which parts of a state are left, and what is made of them."""

from __future__ import annotations

import pytest

from evener.oracle.division.pieces import Piece, whole_piece
from evener.records.errors import NodeLost
from evener.training.elastic.divided import HeldPart, HeldParts, Recovery, choose
from support.refusals import refused

SHAPES: dict[str, tuple[int, ...]] = {"a": (4,), "b": (2,)}


def stage(step: int, *names: str) -> HeldPart:
    """Whole tensors, as a pipeline's stage has them."""
    return HeldPart(step=step, pieces={name: whole_piece(SHAPES[name]) for name in names})


def half(step: int, start: int, end: int) -> HeldPart:
    """A part of `a`, and all of `b`."""
    return HeldPart(step=step, pieces={"a": Piece(shape=(4,), region=(((start, end),),)), "b": whole_piece((2,))})


def rows(*held: tuple[HeldPart, ...]) -> list[HeldParts]:
    """Of ranks, the last of which has come just now."""
    return [*(HeldParts(held=one, shapes=SHAPES) for one in held), HeldParts(held=())]


def test_another_replica_completes_the_last_step() -> None:
    left = rows((stage(7, "b"),), (stage(7, "a"),), (stage(7, "b"),))  # who had the other `a` is gone
    assert choose(left) == Recovery(step=7, givers=((1, 0), (0, 0)))


def test_stages_of_two_damaged_replicas_form_a_whole() -> None:
    assert choose(rows((stage(7, "a"),), (stage(7, "b"),))).step == 7


def test_replicas_with_different_cuts_complete_each_other() -> None:
    left = rows((half(3, 0, 3),), (half(3, 2, 4),))
    assert choose(left) == Recovery(step=3, givers=((0, 0), (1, 0)))
    with pytest.raises(NodeLost):
        choose(rows((half(3, 0, 2),), (half(3, 3, 4),)))


def test_lone_replica_recovers_the_copies_of_an_earlier_step() -> None:
    left = rows((stage(4, "a"), stage(4, "b"), stage(9, "a")))
    assert choose(left) == Recovery(step=4, givers=((0, 0), (0, 1)))


def test_rank_with_the_whole_state_is_the_only_giver() -> None:
    assert choose(rows((stage(5, "a"),), (stage(5, "a", "b"),))) == Recovery(step=5, givers=((1, 0),))


def test_lost_parts_end_the_run_with_advice() -> None:
    with refused(NodeLost):
        choose(rows((stage(4, "a"),), (stage(9, "a"),)))
    with pytest.raises(NodeLost):
        choose([HeldParts(held=())])
