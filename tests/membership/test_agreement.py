"""From which state a generation goes on: that of the highest step, whoever has it."""

from __future__ import annotations

import pytest

from evener.membership.agreement import Agreement, Standing, agree
from evener.records.errors import NodeLost


def standings(*steps: int, unsettled: tuple[int, ...] = ()) -> list[Standing]:
    """One a rank; ranks that are `unsettled` have not done what follows their step."""
    return [Standing(step=step, is_settled=rank not in unsettled) for rank, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("found", "agreement"),
    [
        (standings(5, 5, 5), Agreement(step=5, source=0, gifts=(), new=(), is_settled=True)),
        (standings(5, 6, 5), Agreement(step=6, source=1, gifts=((1, 0), (1, 2)), new=(), is_settled=True)),
        (standings(5, 5, -1), Agreement(step=5, source=0, gifts=((0, 2),), new=(2,), is_settled=True)),
        (standings(-1, 0), Agreement(step=0, source=1, gifts=((1, 0),), new=(0,), is_settled=True)),
        (standings(6, 6, unsettled=(1,)), Agreement(step=6, source=0, gifts=(), new=(), is_settled=False)),
        (standings(6, 5, unsettled=(1,)), Agreement(step=6, source=0, gifts=((0, 1),), new=(), is_settled=True)),
        (
            standings(7, 7, -1, -1, 6),
            Agreement(step=7, source=0, gifts=((0, 2), (1, 3), (0, 4)), new=(2, 3), is_settled=True),
        ),
        (standings(9), Agreement(step=9, source=0, gifts=(), new=(), is_settled=True)),
    ],
)
def test_the_highest_step_counts(found: list[Standing], agreement: Agreement) -> None:
    assert agree(found) == agreement


def test_without_a_state_there_is_nothing_to_go_on_from() -> None:
    with pytest.raises(NodeLost, match="go on from a checkpoint with --resume"):
        agree(standings(-1, -1))
