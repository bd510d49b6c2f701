"""The search loop over simulated trials: assignment of nodes, pruning, and survival of killed processes."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="needs the extra tune")

from evener.records.errors import EvenerError, TrainingFailed
from evener.search.trials import SearchTrial
from support.simulated_trials import Killed, SimulatedRunner, lost, search

SPEEDS = (1.0, 0.5, 0.25)


def score(options: dict[str, str], epoch: int) -> float:
    """Return a score that is best at a rate of 0.01 and a width of 100; one epoch reveals the order of options."""
    return abs(log10(float(options["lr"])) + 2) + abs(int(options["width"]) - 100) / 100 + 1 / epoch


def outcomes(trials: dict[int, SearchTrial]) -> list[Any]:
    return [(trial.number, trial.values, trial.outcome, trial.score) for trial in trials.values()]


def test_equal_seeds_give_equal_trials_on_one_node_and_on_three(tmp_path: Path) -> None:
    alone = search(tmp_path / "alone", (1.0,), SimulatedRunner(score))
    several = search(tmp_path / "several", SPEEDS, SimulatedRunner(score))
    assert outcomes(several.trials) == outcomes(alone.trials)
    assert alone.best is not None
    assert several.best is not None
    assert several.best.number == alone.best.number
    assert {trial.outcome for trial in alone.trials.values()} == {"complete", "pruned"}


@pytest.mark.parametrize(("trials", "joins", "least"), [(50, False, 0.95), (50, True, 0.98), (12, True, 0.97)])
def test_unequal_nodes_reach_nearly_the_sum_of_their_speeds(
    tmp_path: Path, trials: int, joins: bool, least: float
) -> None:
    runner = SimulatedRunner(score)
    search(tmp_path / "study", SPEEDS, runner, trials=trials, epochs=4, prune="none", joins=joins, learns=False)
    ideal = trials * 4 * runner.epoch_seconds / sum(SPEEDS)
    assert ideal / runner.now >= least
    assert runner.now <= trials * 4 * runner.epoch_seconds  # of the fastest node alone


@pytest.mark.parametrize("shared_seconds", [20.0, 2000.0])
def test_one_node_continues_alone_where_waiting_exceeds_computing(tmp_path: Path, shared_seconds: float) -> None:
    apart = SimulatedRunner(score)
    joined = SimulatedRunner(score, shared_seconds=shared_seconds, tick=1.0)
    for runner, joins in ((apart, False), (joined, True)):
        search(tmp_path / f"{joins}", SPEEDS, runner, trials=12, epochs=10, prune="none", joins=joins, learns=False)
    shared = [number for number, names in joined.begun if len(names) > 1]
    assert len(shared) == 1
    assert len([names for number, names in joined.begun if number == shared[0]]) == 3
    assert joined.now <= apart.now


def test_assignment_without_joining_is_optimal(tmp_path: Path) -> None:
    runner = SimulatedRunner(score)
    search(tmp_path / "study", SPEEDS, runner, trials=12, epochs=4, prune="none", joins=False, learns=False)
    seconds = 4 * runner.epoch_seconds
    assert runner.now == pytest.approx(8 * seconds)  # in less, nodes of 1, 1/2 and 1/4 end 7 + 3 + 1 trials at most


def test_fast_nodes_run_the_upper_rungs(tmp_path: Path) -> None:
    runner = SimulatedRunner(score)
    result = search(tmp_path / "study", SPEEDS, runner, trials=30, ahead=3, joins=False)
    slow = [trial for trial in result.trials.values() if "node-2" in trial.nodes and trial.epochs > 3]
    assert slow
    assert all({"node-0", "node-1"} & set(trial.nodes) for trial in slow)


def test_trial_restarts_from_its_checkpoint_at_most_twice(tmp_path: Path) -> None:
    deaths = {(0, 3): 1, (1, 2): 5}

    def kill(number: int, epoch: int) -> EvenerError | None:
        deaths[number, epoch] = deaths.get((number, epoch), 0) - 1
        return lost("node node-0 was killed") if deaths[number, epoch] >= 0 else None

    sentences: list[str] = []
    runner = SimulatedRunner(score, kill=kill)
    result = search(
        tmp_path / "s",
        SPEEDS,
        runner,
        trials=4,
        prune="none",
        joins=False,
        notify=lambda _, sentence: sentences.append(sentence),
    )
    assert (result.trials[0].outcome, result.trials[0].lost_attempts) == ("complete", 1)
    assert (result.trials[1].outcome, result.trials[1].lost_attempts) == ("failed", 3)
    assert [number for number, _ in runner.begun].count(0) == 2
    assert any("epoch 2: node node-0 was killed" in sentence for sentence in sentences)


def test_killed_search_resumes_without_repeating_trials(tmp_path: Path) -> None:
    uninterrupted = search(tmp_path / "uninterrupted", SPEEDS, SimulatedRunner(score))
    ended: list[int] = []
    for life in range(6):
        runner, epochs_left = SimulatedRunner(score), [7 + life]

        def notify(trial: SearchTrial, sentence: str) -> None:
            ended.append(trial.number)

        def kill(number: int, epoch: int, epochs_left: list[int] = epochs_left) -> EvenerError | None:
            epochs_left[0] -= 1
            if not epochs_left[0]:
                raise Killed
            return None

        runner.kill = kill
        runner.done = dict.fromkeys(range(20), 0)
        try:
            result = search(tmp_path / "killed", SPEEDS, runner, resume=life > 0, notify=notify)
        except Killed:
            continue
        break
    else:
        runner = SimulatedRunner(score)
        result = search(tmp_path / "killed", SPEEDS, runner, resume=True, notify=notify)
    assert outcomes(result.trials) == outcomes(uninterrupted.trials)
    assert sorted(ended) == list(range(20))


def test_the_same_error_of_every_trial_ends_the_search(tmp_path: Path) -> None:
    def kill(number: int, epoch: int) -> EvenerError | None:
        return TrainingFailed("my_task.py line 3: ValueError: no")

    with pytest.raises(TrainingFailed):
        search(tmp_path / "study", SPEEDS, SimulatedRunner(score, kill=kill))


def test_one_error_fails_one_trial(tmp_path: Path) -> None:
    runner = SimulatedRunner(score, kill=lambda number, epoch: TrainingFailed("line 3") if number == 2 else None)
    result = search(tmp_path / "study", SPEEDS, runner)
    assert [trial.number for trial in result.trials.values() if trial.outcome == "failed"] == [2]
    assert len(result.trials) == 20
