"""Callbacks: what ends a run, and that all of them are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.commands import train as commands
from evener.config.run_config import RunConfig
from evener.records.errors import InvalidValue, TrainingFailed
from evener.records.events import RunEvent
from evener.records.plan import Assignment, Plan
from evener.records.record import Epoch, Validation
from evener.training.callbacks import EarlyStopping, watched
from support.refusals import refused


def ends(losses: list[float | None], stopping: EarlyStopping) -> int | None:
    """The epoch after which a run with these losses ends."""
    for epoch, loss in enumerate(losses):
        if stopping(Epoch(step=epoch + 1, epoch=epoch, loss=loss)):
            return epoch
    return None


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([3.0, 2.0, 1.0, 0.5], None),
        ([3.0, 2.0, 2.0, 2.5, 0.1], 3),
        ([3.0, 3.0, 2.0, 2.5, 1.9], None),
        ([None, None, None], None),
        ([1.0, float("nan"), float("nan")], 2),
    ],
)
def test_early_stopping_ends_a_run_after_epochs_without_improvement(
    losses: list[float | None], end: int | None
) -> None:
    assert ends(losses, EarlyStopping(patience=2)) == end


def test_early_stopping_ignores_small_improvements() -> None:
    assert ends([1.0, 0.99, 0.98], EarlyStopping(patience=2, least=0.05)) == 2


def test_early_stopping_prefers_the_validation_loss() -> None:
    stopping = EarlyStopping(patience=1)
    for epoch, loss in enumerate([1.0, 2.0]):
        validation = Validation(step=1, epoch=epoch, loss=loss, accuracy=None, seconds=0.1)
        answer = stopping(Epoch(step=1, epoch=epoch, loss=-float(epoch), validation=validation))
    assert answer


def test_early_stopping_resets_for_another_run() -> None:
    stopping = EarlyStopping(patience=1)
    assert ends([1.0, 2.0], stopping) == 1
    assignment = Assignment(rank=0, node="ada", device="cpu", samples=1)
    stopping(Plan(strategy="serial", batch_size=1, assignments=(assignment,)))
    assert ends([3.0, 2.5], stopping) is None


def test_early_stopping_patience_must_be_positive() -> None:
    with refused(InvalidValue):
        EarlyStopping(patience=0)


def test_all_callbacks_run_even_if_one_ends_the_run() -> None:
    called = []

    def first(event: RunEvent) -> bool:
        called.append("first")
        return True

    def second(event: RunEvent) -> None:
        called.append("second")

    with watched([first, second], []) as watch:
        assert watch(Epoch(step=1, epoch=0, loss=None))
    assert called == ["first", "second"]


@pytest.mark.parametrize(
    ("watch", "elastic", "is_elastic"),
    [(None, None, True), (bool, None, False), (bool, True, True), (None, False, False)],
)
def test_watched_run_is_elastic_only_on_request(
    watch: Any, elastic: bool | None, is_elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(commands, "run_on_nodes", lambda *_, **words: said.append(words["is_elastic"]))
    with refused(TrainingFailed):
        commands.perform(RunConfig(task="digits", output=tmp_path, elastic=elastic), quiet=True, watch=watch)
    assert said == [is_elastic]
