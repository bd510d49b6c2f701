"""A generation continues from the state of the highest step, on whichever rank it is."""

from __future__ import annotations

import pytest

from evener.membership.resume_point import RankProgress, ResumePoint, choose_resume_point
from evener.records.errors import NodeLost
from support.refusals import refused


def progress(*steps: int, unsettled: tuple[int, ...] = ()) -> list[RankProgress]:
    """One a rank; ranks that are `unsettled` have not done what follows their step."""
    return [RankProgress(step=step, is_settled=rank not in unsettled) for rank, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("found", "point"),
    [
        (progress(5, 5, 5), ResumePoint(step=5, source=0, transfers=(), new=(), is_settled=True)),
        (progress(5, 6, 5), ResumePoint(step=6, source=1, transfers=((1, 0), (1, 2)), new=(), is_settled=True)),
        (progress(5, 5, -1), ResumePoint(step=5, source=0, transfers=((0, 2),), new=(2,), is_settled=True)),
        (progress(-1, 0), ResumePoint(step=0, source=1, transfers=((1, 0),), new=(0,), is_settled=True)),
        (progress(6, 6, unsettled=(1,)), ResumePoint(step=6, source=0, transfers=(), new=(), is_settled=False)),
        (progress(6, 5, unsettled=(1,)), ResumePoint(step=6, source=0, transfers=((0, 1),), new=(), is_settled=True)),
        (
            progress(7, 7, -1, -1, 6),
            ResumePoint(step=7, source=0, transfers=((0, 2), (1, 3), (0, 4)), new=(2, 3), is_settled=True),
        ),
        (progress(9), ResumePoint(step=9, source=0, transfers=(), new=(), is_settled=True)),
    ],
)
def test_highest_step_is_chosen(found: list[RankProgress], point: ResumePoint) -> None:
    assert choose_resume_point(found) == point


def test_missing_state_raises_node_lost() -> None:
    with refused(NodeLost):
        choose_resume_point(progress(-1, -1))
