"""Which processes make the end of a run unjustified: healthy ones that held the state of its last start."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fault_schedules import Rank, Strikes, resumed_step

BEGINS_AGAIN = "step 0  begins again: before the first step node node-1 (rank 1) was killed by signal 9 at step 0\n"
WITHOUT_ONE = "step 0  node lost: node node-1 (rank 1) was killed by signal 9 (SIGKILL) at step 0; the others go on\n"
FROM_CHECKPOINT = "step 20  begins again: from the checkpoint of step 20, as node-2 came\n"
LOST_LATER = "step 7  node lost: node node-1 (rank 1) was killed by signal 9 (SIGKILL) at step 7\n"


def strikes(folder: Path, shown: list[str], ranks: dict[int, Rank]) -> Strikes:
    for pid in ranks:
        (folder / str(pid)).touch()
    made = Strikes("EVENER_TEST=nothing", folder, lambda: "".join(shown))
    made.ranks = ranks
    return made


@pytest.mark.parametrize(
    ("line", "holders"), [(BEGINS_AGAIN, [2]), (WITHOUT_ONE, [2]), (FROM_CHECKPOINT, [2]), (LOST_LATER, [1, 2])]
)
def test_healthy_rank_of_an_earlier_start_holds_nothing(tmp_path: Path, line: str, holders: list[int]) -> None:
    shown: list[str] = []
    ended = strikes(tmp_path, shown, {1: Rank(first=0.0, last=-0.5)})
    shown.append(line)
    ended.see()
    now = ended.now()
    ended.ranks[2] = Rank(first=now, last=now + 0.5)
    (tmp_path / "2").touch()
    assert ended.healthy_holders(now + 1.0) == holders


def test_rank_that_was_struck_or_computed_nothing_is_no_healthy_holder(tmp_path: Path) -> None:
    ranks = {
        1: Rank(first=0.0, last=9.0, strikes=["kill"]),
        2: Rank(first=0.0, last=9.0, strikes=["freeze"], away=5.0),
        3: Rank(first=0.0, last=9.0, strikes=["freeze"], away=0.5),
        4: Rank(first=0.0, last=9.0),
        5: Rank(first=0.0, last=1.0),
    }
    ended = strikes(tmp_path, [], ranks)
    (tmp_path / "4").unlink()
    assert ended.healthy_holders(10.0) == [3]
    assert ended.was_given_up_healthy(10.0) == [5]


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("step 23  epoch 2/5\n", 0),
        (BEGINS_AGAIN, 0),
        (FROM_CHECKPOINT, 20),
        ("step 20  resumed: resumed after\nstep 20 from node-0/checkpoints/step-00000020\n", 20),
        (FROM_CHECKPOINT + "step 60  resumed: resumed after step 60 from node-0/checkpoints/step-00000060\n", 60),
    ],
)
def test_record_begins_after_the_step_of_the_last_checkpoint(said: str, step: int) -> None:
    assert resumed_step(said) == step
