"""The one rule of heartbeats as tables: who is due, what moved, what ought to, and for how long it has not."""

import pytest

from evener.system.heartbeat import Progress, interval, is_due


@pytest.mark.parametrize(("patience", "seconds"), [(15.0, 0.5), (4.0, 0.5), (2.0, 0.25), (0.4, 0.05)])
def test_heartbeat_interval_follows_the_patience(patience: float, seconds: float) -> None:
    assert interval(patience) == seconds


@pytest.mark.parametrize(("last", "now", "due"), [(0.0, 0.0, False), (0.0, 0.49, False), (0.0, 0.5, True)])
def test_heartbeat_is_due_an_interval_after_the_last(last: float, now: float, due: bool) -> None:
    assert is_due(last, now, patience=15.0) is due


@pytest.mark.parametrize(
    ("seen", "idle"),
    [
        ([(0.0, 0, True)], 0.0),
        ([(5.0, 0, True)], 5.0),
        ([(5.0, 0, False)], 0.0),
        ([(5.0, 1, True)], 0.0),
        ([(5.0, 1, True), (9.0, 1, True)], 4.0),
        ([(5.0, 1, True), (9.0, 1, True), (10.0, 2, True)], 0.0),
        ([(5.0, 1, True), (9.0, 1, False), (10.0, 1, True)], 1.0),
        ([(5.0, 0, False), (105.0, 0, True)], 100.0),
    ],
)
def test_idle_seconds_count_expected_but_missing_progress(seen: list[tuple[float, int, bool]], idle: float) -> None:
    progress = Progress(0.0)
    answers = [progress.idle_seconds(counter, expected=expected, now=now) for now, counter, expected in seen]
    assert answers[-1] == idle
