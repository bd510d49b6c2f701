"""Callbacks of Ultralytics on the ranks of a run, without Ultralytics."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evener.frontends.yolo.callbacks import LeaderCallbacks, has_user_callbacks, open_trackers, shared_state

EVENTS = ("on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start")


def trainer() -> Any:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return SimpleNamespace(
        model=model,
        ema=SimpleNamespace(ema=deepcopy(model)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        stopper=SimpleNamespace(patience=3),
        train_loader=SimpleNamespace(dataset=SimpleNamespace(mosaic=True, transforms=[])),
        args=SimpleNamespace(box=7.5),
        epochs=3,
    )


def test_callbacks_run_on_the_rank_that_leads_at_the_time() -> None:
    leads = [False]
    callbacks = LeaderCallbacks({"on_train_end": [print]}, lambda: leads[0])
    callbacks["on_train_end"].append(repr)
    assert callbacks.get("on_train_end", []) == []
    leads[0] = True
    assert callbacks.get("on_train_end", []) == [print, repr]
    assert callbacks.get("on_train_start", []) == []


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "more epochs": ("the number of epochs", lambda one: setattr(one, "epochs", 4)),
    "a gain of the loss": ("settings", lambda one: setattr(one.args, "box", 1.0)),
    "a frozen weight": ("which weights are trained", lambda one: one.model[0].bias.requires_grad_(False)),
    "other weights": ("weights or averages", lambda one: one.model[0].weight.data.mul_(2)),
    "a reset average": ("weights or averages", lambda one: one.ema.ema[0].weight.data.zero_()),
    "running statistics": ("weights or averages", lambda one: one.model[1].running_mean.zero_()),
    "a rate": ("the optimizer", lambda one: one.optimizer.param_groups[0].update(lr=0.2)),
    "more patience": ("early stopping", lambda one: setattr(one.stopper, "patience", 4)),
    "no mosaics": ("images", lambda one: setattr(one.train_loader.dataset, "mosaic", False)),
    "other transforms": ("images", lambda one: setattr(one.train_loader.dataset, "transforms", [])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_callback_are_seen_and_named(change: str) -> None:
    one, (name, make) = trainer(), CHANGES[change]
    before = shared_state(one)
    with torch.no_grad():
        make(one)
    after = shared_state(one)
    assert name in [part for part, value in before.items() if value != after[part]]


def test_reading_everything_changes_nothing() -> None:
    one = trainer()
    before = shared_state(one)
    one.model.eval()
    one.model(torch.ones(4, 2)).sum().item()
    deepcopy(one.model).state_dict()
    assert shared_state(one) == before


def test_trainer_that_is_not_set_up_has_settings_alone() -> None:
    one = SimpleNamespace(model="yolov8n.pt", epochs=3, args=SimpleNamespace(box=7.5), ema=None)
    before = shared_state(one)
    one.args.box = 1.0
    assert shared_state(one)["settings"] != before["settings"]


def test_own_functions_are_told_from_those_of_ultralytics() -> None:
    def known(_: Any) -> None: ...

    known.__module__ = "ultralytics.utils.callbacks.base"
    assert not has_user_callbacks({"on_train_end": [known]})
    assert has_user_callbacks({"on_train_end": [known, lambda _: None]})
    assert has_user_callbacks({"on_train_end": [partial(known)]})
    assert has_user_callbacks({"on_train_end": [list[Any]().append]})


def test_trackers_alone_begin_again_with_the_events_that_have_passed() -> None:
    seen = list[str]()

    def function(name: str, module: str) -> Any:
        def run(trainer: Any) -> None:
            seen.append(name)
            assert trainer.args.resume is True  # trackers go on with a run that they find

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
    trainer = SimpleNamespace(callbacks=callbacks, args=SimpleNamespace(resume=False))
    open_trackers(trainer, EVENTS[:2])
    assert seen == list(EVENTS[:2])
    assert trainer.args.resume is False
