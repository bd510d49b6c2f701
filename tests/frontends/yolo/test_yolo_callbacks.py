"""Callbacks of Ultralytics on the ranks of a run, without Ultralytics."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evener.frontends.yolo.callbacks import LeaderCallbacks, TrainerMark, has_own, open_trackers

EVENTS = ("on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start")


def trainer(epochs: int = 3, *, scale: float = 1.0, is_frozen: bool = False) -> Any:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            weight.fill_(scale * (index + 1))
    model.bias.requires_grad = not is_frozen
    return SimpleNamespace(model=model, stop=False, epochs=epochs)


def test_callbacks_run_on_the_rank_that_leads_at_the_time() -> None:
    leads = [False]
    callbacks = LeaderCallbacks({"on_train_end": [print]}, lambda: leads[0])
    callbacks["on_train_end"].append(repr)
    assert callbacks.get("on_train_end", []) == []
    leads[0] = True
    assert callbacks.get("on_train_end", []) == [print, repr]
    assert callbacks.get("on_train_start", []) == []


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({}, ""),
        ({"scale": 1 + 1e-7}, ""),
        ({"scale": 1.001}, "weights, or how"),
        ({"scale": nan}, "weights, or how"),
        ({"scale": inf}, "weights, or how"),
        ({"is_frozen": True}, "which weights"),
        ({"epochs": 4}, "epochs"),
    ],
)
def test_changes_of_one_rank_are_named(other: dict[str, Any], difference: str) -> None:
    found = TrainerMark.of(trainer()).difference(TrainerMark.of(trainer(**other)))
    assert difference in found
    assert bool(found) == bool(difference)


def test_weights_that_are_no_numbers_on_all_ranks_are_alike() -> None:
    assert TrainerMark.of(trainer(scale=nan)).difference(TrainerMark.of(trainer(scale=nan))) == ""


def test_own_functions_are_told_from_those_of_ultralytics() -> None:
    def known(_: Any) -> None: ...

    known.__module__ = "ultralytics.utils.callbacks.base"
    assert not has_own({"on_train_end": [known]})
    assert has_own({"on_train_end": [known, lambda _: None]})
    assert has_own({"on_train_end": [partial(known)]})


def test_trackers_alone_begin_again_with_the_events_that_have_passed() -> None:
    seen = list[str]()

    def function(name: str, module: str) -> Any:
        def run(_: Any) -> None:
            seen.append(name)

        run.__module__ = module
        return run

    callbacks = {
        event: [
            function("default", "ultralytics.utils.callbacks.base"),
            function(event, "ultralytics.utils.callbacks.tensorboard"),
            function("own", __name__),
        ]
        for event in EVENTS
    }
    open_trackers(SimpleNamespace(callbacks=callbacks), EVENTS[:2])
    assert seen == list(EVENTS[:2])
