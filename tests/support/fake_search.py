"""A search that never was, for tests of what shows one."""

from __future__ import annotations

from evener.records.search_record import Outcome, SearchRecord, TrialSummary


def fake_search(trials: int = 12, *, is_over: bool = True) -> SearchRecord:
    """Of a learning rate, a width and a kind of optimiser; the last trial goes on unless all is over."""
    made = tuple(_trial(number, is_running=not is_over and number == trials - 1) for number in range(trials))
    complete = [one for one in made if one.outcome == "complete"]
    best = max(complete, key=lambda one: one.score or 0.0).number if complete else None
    return SearchRecord(
        task="digits",
        metric="accuracy",
        epochs=9,
        seed=0,
        trials=made,
        best=best,
        importances={"lr": 0.7, "width": 0.2, "kind": 0.1} if is_over else {},
        seconds=100.0 * trials,
        wanted=12,
        is_over=is_over,
    )


def _trial(number: int, *, is_running: bool) -> TrialSummary:
    rate = 10 ** (-4 + 3 * (7 * number % 12) / 11)
    epochs = 2 if is_running else 1 if number % 4 == 1 else 9
    scores = {epoch: 1 - 0.9 / epoch ** (1.5 * rate**0.2) for epoch in range(1, epochs + 1)}
    outcomes: dict[int, Outcome] = {1: "pruned", 3: "failed"}
    outcome = None if is_running else outcomes.get(number % 4 if number % 8 != 7 else 0, "complete")
    return TrialSummary(
        number=number,
        outcome=outcome,
        values={"lr": f"{rate}", "width": str(2 ** (4 + number % 4)), "kind": ("sgd", "adam")[number % 2]},
        scores=scores,
        score=scores[epochs],
        nodes=("node-0", "node-1") if number % 5 == 0 else (f"node-{number % 3}",),
        seconds=12.5 * epochs,
        reason="<b>my_task.py line 25: ValueError</b>: an unlucky width" if outcome == "failed" else "",
        is_running=is_running,
    )
