"""The loop of a search, over imagined trials: who takes what, what is pruned, what survives whose death."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="needs the extra tune")

from evener.records.errors import EvenerError, TrainingFailed
from evener.search.trials import SearchTrial

pytest.importorskip("optuna", reason="needs the extra tune")
from support.simulated_trials import ImaginedRuns, Killed, lost, search

SPEEDS = (1.0, 0.5, 0.25)


def score(options: dict[str, str], epoch: int) -> float:
    """Best at a rate of 0.01 and a width of 100; the order of options shows after an epoch."""
    return abs(log10(float(options["lr"])) + 2) + abs(int(options["width"]) - 100) / 100 + 1 / epoch


def outcomes(trials: dict[int, SearchTrial]) -> list[Any]:
    return [(one.number, one.values, one.outcome, one.score) for one in trials.values()]


def test_equal_seeds_find_the_same_on_one_node_and_on_three(tmp_path: Path) -> None:
    alone = search(tmp_path / "alone", (1.0,), ImaginedRuns(score))
    several = search(tmp_path / "several", SPEEDS, ImaginedRuns(score))
    assert outcomes(several.trials) == outcomes(alone.trials)
    assert alone.best is not None
    assert several.best is not None
    assert several.best.number == alone.best.number
    assert {one.outcome for one in alone.trials.values()} == {"complete", "pruned"}


@pytest.mark.parametrize(("trials", "joins", "least"), [(50, False, 0.95), (50, True, 0.98), (12, True, 0.97)])
def test_unequal_nodes_end_nearly_as_soon_as_their_summed_speed_allows(
    tmp_path: Path, trials: int, joins: bool, least: float
) -> None:
    runs = ImaginedRuns(score)
    search(tmp_path / "study", SPEEDS, runs, trials=trials, epochs=4, prune="none", joins=joins, learns=False)
    ideal = trials * 4 * runs.epoch_seconds / sum(SPEEDS)
    assert ideal / runs.now >= least
    assert runs.now <= trials * 4 * runs.epoch_seconds  # of the fastest node alone


@pytest.mark.parametrize("shared_seconds", [20.0, 2000.0])
def test_where_waiting_takes_longer_than_what_is_shared_one_node_goes_on_alone(
    tmp_path: Path, shared_seconds: float
) -> None:
    apart = ImaginedRuns(score)
    joined = ImaginedRuns(score, shared_seconds=shared_seconds, tick=1.0)
    for runs, joins in ((apart, False), (joined, True)):
        search(tmp_path / f"{joins}", SPEEDS, runs, trials=12, epochs=10, prune="none", joins=joins, learns=False)
    shared = [number for number, names in joined.begun if len(names) > 1]
    assert len(shared) == 1
    assert len([names for number, names in joined.begun if number == shared[0]]) == 3
    assert joined.now <= apart.now


def test_without_joining_no_whole_trials_could_end_sooner(tmp_path: Path) -> None:
    runs = ImaginedRuns(score)
    search(tmp_path / "study", SPEEDS, runs, trials=12, epochs=4, prune="none", joins=False, learns=False)
    seconds = 4 * runs.epoch_seconds
    assert runs.now == pytest.approx(8 * seconds)  # in less, nodes of 1, 1/2 and 1/4 end 7 + 3 + 1 trials at most


def test_upper_rungs_are_left_to_fast_nodes(tmp_path: Path) -> None:
    runs = ImaginedRuns(score)
    found = search(tmp_path / "study", SPEEDS, runs, trials=30, ahead=3, joins=False)
    slow = [one for one in found.trials.values() if "node-2" in one.nodes and one.epochs > 3]
    assert slow
    assert all({"node-0", "node-1"} & set(one.nodes) for one in slow)


def test_a_trial_goes_back_to_its_checkpoint_when_a_node_dies_and_fails_the_third_time(tmp_path: Path) -> None:
    deaths = {(0, 3): 1, (1, 2): 5}

    def kill(number: int, epoch: int) -> EvenerError | None:
        deaths[number, epoch] = deaths.get((number, epoch), 0) - 1
        return lost("node node-0 was killed") if deaths[number, epoch] >= 0 else None

    said: list[str] = []
    runs = ImaginedRuns(score, kill=kill)
    found = search(
        tmp_path / "s", SPEEDS, runs, trials=4, prune="none", joins=False, tell=lambda trial, word: said.append(word)
    )
    assert (found.trials[0].outcome, found.trials[0].attempts) == ("complete", 1)
    assert (found.trials[1].outcome, found.trials[1].attempts) == ("failed", 3)
    assert "the 3rd time" in found.trials[1].reason
    assert [number for number, _ in runs.begun].count(0) == 2
    assert "goes back to epoch 2: node node-0 was killed" in said


def test_a_search_that_is_killed_goes_on_where_it_was_and_counts_nothing_twice(tmp_path: Path) -> None:
    whole = search(tmp_path / "whole", SPEEDS, ImaginedRuns(score))
    ended: list[int] = []
    for life in range(6):
        runs, left = ImaginedRuns(score), [7 + life]

        def tell(trial: SearchTrial, word: str, left: list[int] = left) -> None:
            ended.append(trial.number)

        def kill(number: int, epoch: int, left: list[int] = left) -> EvenerError | None:
            left[0] -= 1
            if not left[0]:
                raise Killed
            return None

        runs.kill = kill
        runs.done = dict.fromkeys(range(20), 0)
        try:
            found = search(tmp_path / "killed", SPEEDS, runs, resume=life > 0, tell=tell)
        except Killed:
            continue
        break
    else:
        runs = ImaginedRuns(score)
        found = search(tmp_path / "killed", SPEEDS, runs, resume=True, tell=tell)
    assert outcomes(found.trials) == outcomes(whole.trials)
    assert sorted(ended) == list(range(20))


def test_the_same_error_of_every_trial_ends_the_search(tmp_path: Path) -> None:
    def kill(number: int, epoch: int) -> EvenerError | None:
        return TrainingFailed("my_task.py line 3: ValueError: no")

    with pytest.raises(TrainingFailed, match="5 trials ended alike: my_task"):
        search(tmp_path / "study", SPEEDS, ImaginedRuns(score, kill=kill))


def test_one_error_fails_one_trial(tmp_path: Path) -> None:
    runs = ImaginedRuns(score, kill=lambda number, epoch: TrainingFailed("line 3") if number == 2 else None)
    found = search(tmp_path / "study", SPEEDS, runs)
    assert [one.number for one in found.trials.values() if one.outcome == "failed"] == [2]
    assert len(found.trials) == 20
